"""One real server for the tests that only talk to it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.served import Served


@pytest.fixture(scope="session")
def served_tiny(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`winnow serve` on the tiny checkpoint, called `tiny`; leave it idle.

    Without its end token, which random weights choose anywhere: answers are as long as asked for.
    """
    endless = tmp_path_factory.mktemp("endless") / "tiny"
    shutil.copytree(tiny, endless, ignore=shutil.ignore_patterns("generation_config.json"))
    config = json.loads((endless / "config.json").read_text())
    del config["text_config"]["eos_token_id"]
    (endless / "config.json").write_text(json.dumps(config))
    options = ("--served-model-name", "tiny", "--num-pages", "64", "--max-running", "8")
    with Served(str(endless), *options, threads=1) as server:
        yield server
