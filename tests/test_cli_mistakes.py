"""Every mistake that a user can make: one sentence, no traceback, nothing left behind."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import GREEDY, Result, process, winnow, without_tokenizer

from winnow.config import SamplingParams
from winnow.engine.llm import LLM


@pytest.fixture(scope="module")
def no_tokenizer(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint without its tokenizer."""
    return without_tokenizer(tiny, tmp_path_factory.mktemp("cli") / "no tokenizer")


REFUSED = [
    ("generate /nowhere --prompt x", r"'/nowhere' is no directory: give a .*preset"),
    ("generate minimax-m3 --prompt x", r"no directory: .* random_weights \(--random-weights\)"),
    ("generate {empty} --prompt x", r"has no config\.json: give the directory of a checkpoint"),
    ("generate {llama} --prompt x", r"model_type is 'llama': only models of MiniMax-M3's family"),
    ("generate {tiny} --random-weights --prompt x", r"no preset .*; known: mini"),
    ("generate {tiny} --layers 2 --prompt x", r"num_layers \(--layers\) cuts presets only"),
    (
        "generate minimax-m3 --random-weights --layers 61 --token-ids 1",
        r"asked for 61 layers, the model has 60: choose 1 to 60",
    ),
    (
        "generate minimax-m3 --random-weights --layers 0 --token-ids 1",
        r"asked for 0 layers, the model has 60: choose 1 to 60",
    ),
    ("generate {tiny} --prompt x --device mps", r"'mps': use cpu, cuda, or"),
    ("generate {tiny} --prompt x --backend b", r"no backend 'b'; known: cpu"),
    ("generate {tiny} --prompt x --backend hopper", r"not run on device cpu"),
    (
        "generate {tiny} --prompt x --num-pages 1",
        r"has 1 pages .* start with num_pages \(--num-pages\) 2",
    ),
    ("generate {tiny} --prompt x --max-step-tokens 0", r"is 0; .* at least 1"),
    (
        "generate {tiny} --prompt x --max-model-len 65537",
        r"max_model_len is 65537, the model has 65536 positions: lower it to 65536",
    ),
    ("generate {tiny} --prompt ''", r"the prompt has 0 tokens: give at least 1"),
    ("generate {tiny} --token-ids ' '", r"' ': give whole numbers with commas"),
    ("generate {tiny} --token-ids 1,,2", r"'1,,2': give whole numbers with commas"),
    ("generate {tiny} --token-ids 1,272", r"1 is 272, the vocabulary has 272: .* 271"),
    ("generate {tiny} --token-ids=-1,2", r"prompt token 0 is -1, the vocabulary has 272"),
    ("generate {tiny} --token-ids 1,b", r"'1,b': give whole numbers with commas"),
    ("generate {tiny} --token-ids 1.5", r"'1\.5': give whole numbers with commas"),
    ("generate {tiny} --prompt-file /nowhere", r"/nowhere: .*No such file.*UTF-8"),
    ("generate {tiny} --prompt-file /", r"from /: .*Is a directory.*text file"),
    ("generate {tiny} --prompt-file {binary}", r"can't decode byte 0xff.*text file"),
    ("generate {no_tokenizer} --prompt x", r"no tokenizer\.json: give token ids"),
    (
        "generate {no_tokenizer} --token-ids 1 --stop x",
        r"stop strings need a tokenizer\.json in the checkpoint: use stop_ids",
    ),
    (
        "generate {tiny} --prompt x --max-tokens 1000000000000",
        r"make 1000000000001, the engine takes 65536: lower max_tokens to 65535",
    ),
    (
        "generate {tiny} --prompt x --max-tokens 600 --num-pages 4",
        r"request needs 5 pages, the cache has 3: .*216 or start with num_pages .* 6",
    ),
    ("generate {tiny} --prompt x --max-tokens 0", r"max_tokens is 0; .* 1:"),
    ("generate {tiny} --prompt x --temperature nan", r"temperature is nan; it"),
    ("generate {tiny} --prompt x --top-p 1.5", r"1\.5; .* 0\.0 to 1\.0"),
    ("generate {tiny} --prompt x --stop ''", r"an empty string.*: remove it"),
    ("generate {tiny} --prompt x --stop-id 272", r"272, the vocabulary has 272"),
    ("generate {tiny} --prompt x --logprobs 21 --json", r"logprobs is 21; .* 0 to 20"),
    ("generate {tiny} --prompt x --logprobs 2", r"--logprobs 2 without --json shows nothing: add"),
    ("bench kernels --backend cpu --only zzz", r"no workload has 'zzz' in its name: without"),
    (
        "generate {tiny} --prompt x --min-tokens 200",
        r"min_tokens is 200, max_tokens is 128: raise max_tokens to 200 or lower min_tokens",
    ),
    ("plan /nowhere", r"neither a preset \(minimax-m3, .*\) nor a directory"),
    ("plan minimax-m3 --parallel tp3", r"64 heads do not divide among 3 ranks: use tp with one"),
    ("plan minimax-m3 --parallel 4", r"plan '4' is not understood: write tpN"),
    ("plan minimax-m3 --gpus 6 --parallel tp4", r"6 GPUs do not divide .*: use 4 GPUs"),
    ("plan minimax-m3 --gpu b100", r"no GPU 'b100': use one of h100, .*, or NAME=GB"),
    ("plan minimax-m3 --gpu own=lots", r"'own=lots' is not NAME=GB"),
    ("plan minimax-m3 --gpu own=288", r"needs 442\.0.* GB .* 259\.200 GB are usable"),
    ("plan minimax-m3 --context 600000", r"600000 tokens .* 524288 positions: lower it"),
    ("plan minimax-m3 --draft 999", r"999 draft layers .*, the model itself has 60: give 0 to 60"),
    ("plan minimax-m3 --compare minimax-m3:draft=61", r"61 draft layers .*: give 0 to 60"),
    ("plan minimax-m3 --compare m4", r"'m4' is neither a preset"),
    ("plan minimax-m3 --compare minimax-m3:kv", r"'kv' is no option=value; use gpu, .* draft"),
    ("plan minimax-m3 --compare minimax-m3:tp=4", r"'tp=4' is no option=value"),
    ("plan minimax-m3 --compare minimax-m3:kv=fp4", r"kv 'fp4' is not one of model, fp8, nvfp4"),
    ("plan minimax-m3 --compare minimax-m3:draft=-1", r"draft '-1' is not a whole number"),
    ("bench conformance --backend b", r"no backend 'b'; known: cpu, reference"),
    ("convert {empty} {new}", r"has no config\.json: give the directory of a checkpoint"),
    ("convert {tiny} {no_tokenizer}", r"exists and is not empty: choose another"),
    ("convert {tiny} {binary}/x", r"Not a directory"),
    ("make-tiny {tiny}", r"already holds a checkpoint: choose another directory"),
    ("make-tiny {binary}/x", r"Not a directory"),
]
"""Asked in words that the command knows, and refused with status 1."""

NO_COMMAND = [
    ("", r"required: COMMAND"),
    ("serve-up", r"invalid choice: 'serve-up'"),
    ("bench", r"required: SUITE"),
    ("generate {tiny}", r"one of the arguments --prompt --chat --prompt-file --token-ids is"),
    ("generate {tiny} --prompt x --token-ids 1", r"not allowed with"),
    ("generate {tiny} --prompt x --max-tokens 1e3", r"invalid int .*'1e3'"),
    ("generate {tiny} --prompt x --kv-format fp4", r"'fp4' \(choose from"),
    ("generate {tiny} --prompt x --dtype half", r"'half' \(choose from"),
    ("plan minimax-m3 --gpus 0", r"'0' is not a whole number of at least 1"),
    (
        "plan minimax-m3 --gpu h100 --gpu h200",
        r"--gpu: given twice, h100 and h200, .* with --compare MODEL:gpu=h200",
    ),
    ("plan minimax-m3 --draft=-1", r"'-1' is not a whole number of at least 0"),
    ("plan minimax-m3 --context 1e5", r"'1e5' is not a whole number of at least 1"),
    ("plan minimax-m3 --kv fp4", r"'fp4' \(choose from"),
    ("plan minimax-m3 --charge-index maybe", r"'maybe' \(choose from"),
    ("plan minimax-m3 --compare", r"expected at least one argument"),
    ("plan minimax-m3 --memory-fraction 0", r"'0' is not a number above 0 and up to 1"),
    ("plan minimax-m3 --reserve-gb much", r"'much' is not a number from 0"),
    ("make-tiny {new} --seed -1", r"'-1' is not a whole number from 0 to"),
    ("bench step {tiny} -o {new}/x", r"there is no directory .*new: make it first"),
    ("bench kernels -o {empty}", r"empty is a directory: name a file in it"),
    ("report -o {new}/x", r"there is no directory .*new: make it first"),
]
"""Words that argparse refuses, with status 2 and the usage."""


@pytest.fixture
def places(tiny: Path, no_tokenizer: Path, tmp_path: Path) -> dict[str, Path]:
    """What the names in braces stand for."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").mkdir()
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text('{"model_type": "llama"}')
    own = {name: tmp_path / name for name in ("binary", "empty", "llama", "new")}
    return {"tiny": tiny, "no_tokenizer": no_tokenizer, **own}


def run(line: str, places: dict[str, Path]) -> Result:
    return winnow(*(word.format(**places) for word in shlex.split(line)))


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_cannot_be_done_is_refused_in_one_sentence_and_leaves_nothing_behind(
    places: dict[str, Path], tmp_path: Path, line: str, says: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    status, out, err = run(line, places)
    assert (status, out) == (1, "")
    assert re.fullmatch(f"winnow: .*{says}.*\n", err), err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "says"), NO_COMMAND, ids=[line or "nothing" for line, _ in NO_COMMAND]
)
def test_words_that_are_no_command_are_refused_with_the_usage(
    places: dict[str, Path], line: str, says: str
) -> None:
    status, out, err = run(line, places)
    assert (status, out) == (2, "")
    assert re.fullmatch(
        f"usage: winnow.*\nwinnow[^\n]*: error: [^\n]*{says}[^\n]*\n", err, re.DOTALL
    )


def test_a_format_that_is_already_quantised_is_not_quantised_again(
    tiny: Path, tmp_path: Path
) -> None:
    assert winnow("convert", tiny, tmp_path / "once").status == 0
    status, _, err = winnow("convert", tmp_path / "once", tmp_path / "twice")
    assert status == 1
    assert "quantised already (mixed-nvfp4)" in err
    assert not (tmp_path / "twice").exists()


def test_an_interrupt_ends_with_130_and_no_traceback(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: LLM, prompt: str, params: SamplingParams) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    assert winnow("generate", tiny, "--prompt", "x", *GREEDY) == (130, "", "")


@pytest.mark.parametrize("option", ["--stop", "--prompt"])
def test_bytes_that_are_no_text_are_refused_in_one_sentence(tiny: Path, option: str) -> None:
    prompt = (b"--prompt", b"x") if option == "--stop" else ()
    done = process("generate", tiny, *prompt, option, b"a\xc3", *GREEDY)
    assert (done.returncode, done.stdout) == (1, b"")
    assert re.fullmatch(rb"winnow: [^\n]*'\\udcc3'[^\n]*whole characters[^\n]*\n", done.stderr)


def test_a_closed_output_is_told_in_one_sentence(tiny: Path) -> None:
    command = f"exec {sys.executable} -m winnow generate {tiny} --prompt x >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == ("winnow: standard output is closed: send it to a file or to /dev/null\n")


def test_kernels_that_cannot_be_kept_are_refused_in_one_sentence(
    tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    home = str(tmp_path / "file")
    done = process("generate", tiny, "--prompt", "x", *GREEDY, XDG_CACHE_HOME=home)
    assert (done.returncode, done.stdout) == (1, b"")
    assert re.fullmatch(rb"winnow: the cpu backend .*file/winnow .*: set XDG_CACH.*\n", done.stderr)
