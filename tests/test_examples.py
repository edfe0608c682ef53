"""The examples run as they stand, and show what they say they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from winnow import LLM, SamplingParams

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, model: Path, directory: Path) -> str:
    """What an example prints when a user starts it from another directory."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, model],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_every_example_is_run_here() -> None:
    tested = re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8"))
    assert sorted(set(tested)) == sorted(path.name for path in EXAMPLES.iterdir() if path.is_file())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 40
    assert f"python examples/{path.name} MODEL_DIR\n" in text


def test_generate_continues_every_prompt_the_same_way_each_time(tiny: Path, tmp_path: Path) -> None:
    first, second = (run("generate.py", tiny, tmp_path) for _ in range(2))
    assert first == second
    prompts = [line.split("' -> '")[0] for line in first.splitlines()]
    assert prompts == [
        "'The capital of France is",
        "'A page holds 128 tokens of every layer, so",
        r"'def quantise(values):\n",
    ]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the examples run here: in bfloat16 torch's products depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_stream_prints_the_whole_text(tiny: Path, tmp_path: Path) -> None:
    printed = run("stream.py", tiny, tmp_path)
    text, last = printed.rsplit("\n", 2)[:2]
    params = SamplingParams(max_tokens=48, temperature=0.7, seed=7)
    (whole,) = LLM(str(tiny), num_pages=8).generate(["Once upon a time"], params)
    # A pipe read as text gives every end of line as \n.
    assert whole.text is not None
    assert text == whole.text.replace("\r\n", "\n").replace("\r", "\n")
    number = len(whole.token_ids)
    assert re.fullmatch(rf"first token after \d+ ms, {number} in \d+\.\d\d s", last)


def test_prefix_cache_finds_the_document_the_second_time(tiny: Path, tmp_path: Path) -> None:
    usages = re.findall(
        r"(\d+) prompt tokens, (\d+) from the cache\n", run("prefix_cache.py", tiny, tmp_path)
    )
    (_, before), (_, after) = [(int(prompt), int(cached)) for prompt, cached in usages]
    document = 20 * len("Winnow keeps 128 tokens of every layer in one row of bytes. ")
    assert before == 0
    assert after == document // 128 * 128
