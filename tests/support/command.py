"""Running `winnow` as a user does, in this process or in one of its own."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from winnow.cli import main

GREEDY = ("--temperature", "0", "--ignore-eos", "--num-pages", "16")


class Result(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)


def winnow(*words: str | Path) -> Result:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:
            # How argparse ends.
            status = int(str(end.code))
    return Result(status, out.getvalue(), err.getvalue())


def process(
    *words: str | bytes | Path,
    stdin: bytes = b"",
    stdout: int = subprocess.PIPE,
    **environment: str,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a process of its own, whose output is buffered as it is by default."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-m", "winnow", *words],
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        timeout=300,
        check=False,
    )


def without_tokenizer(checkpoint: Path, directory: Path) -> Path:
    """A copy of a checkpoint that knows no text; gives `directory` back."""
    shutil.copytree(checkpoint, directory, ignore=shutil.ignore_patterns("tokenizer*"))
    return directory
