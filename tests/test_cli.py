"""Every command as a user runs it; tests/test_cli_mistakes.py has what a user may get wrong."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.command import GREEDY, process, winnow, without_tokenizer

from winnow import __version__
from winnow.bench import conformance
from winnow.engine.text import load_tokenizer
from winnow.model.checkpoint.tiny_config import TinyGeometry, byte_tokenizer, tiny_config
from winnow.ops.table import kernels
from winnow.spec import presets

LONG_IDS = ",".join(str(i * 37 % 256) for i in range(600))


@pytest.fixture(scope="module")
def no_tokenizer(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint without its tokenizer."""
    return without_tokenizer(tiny, tmp_path_factory.mktemp("cli") / "no tokenizer")


@pytest.fixture
def small_preset(monkeypatch: pytest.MonkeyPatch) -> str:
    """A preset that fits a test machine, with NVFP4 experts and MXFP8 linears."""
    config = {
        **tiny_config(TinyGeometry(), byte_tokenizer()),
        "quantization_config": presets._MIXED,
    }
    monkeypatch.setitem(presets._PRESETS, "small", config)
    return "small"


def test_text_is_printed_as_the_json_has_it(tiny: Path) -> None:
    words = ("generate", tiny, "--prompt", "hello", "--max-tokens", "12", *GREEDY)
    answer = winnow(*words, "--json").json
    assert len(answer["token_ids"]) == 12
    plain = winnow(*words)
    assert plain == (0, answer["text"] + "\n", "")


def test_the_json_has_tokens_text_reason_and_usage(tiny: Path) -> None:
    words = ("--prompt", "hello", "--max-tokens", "5", *GREEDY, "--json")
    answer = winnow("generate", tiny, *words).json
    assert list(answer) == ["token_ids", "text", "finish_reason", "usage"]
    tokenizer = load_tokenizer(tiny)
    assert tokenizer is not None
    assert answer["text"] == tokenizer.decode(answer["token_ids"])
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "cached_tokens": 0}


def test_a_checkpoint_without_tokenizer_gives_ids_and_null_text(no_tokenizer: Path) -> None:
    words = ("generate", no_tokenizer, "--token-ids", "1,2,3", "--max-tokens", "4", *GREEDY)
    answer = winnow(*words, "--json").json
    assert answer["text"] is None
    assert len(answer["token_ids"]) == 4
    assert winnow(*words).out == ",".join(map(str, answer["token_ids"])) + "\n"


def test_every_way_to_give_a_prompt_gives_the_same_tokens(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Zwölf Boxkämpfer\n"
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    tokenizer = load_tokenizer(tiny)
    assert tokenizer is not None
    ids = ", ".join(map(str, tokenizer.encode(text)))
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    answers = [
        winnow("generate", tiny, option, value, "--max-tokens", "6", *GREEDY, "--json").json
        for option, value in (
            ("--prompt", text),
            ("--token-ids", ids),
            ("--prompt-file", file),
            ("--prompt-file", "-"),
        )
    ]
    assert answers[1:] == answers[:1] * 3
    assert answers[0]["usage"]["prompt_tokens"] == len(text.encode())


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(tiny: Path) -> None:
    def tokens(seed: int) -> list[int]:
        words = ("--max-tokens", "16", "--seed", str(seed), "--num-pages", "8", "--json")
        return winnow("generate", tiny, "--token-ids", "1,2", *words).json["token_ids"]

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)


def test_options_that_are_not_given_are_the_checkpoints_own(tiny: Path, tmp_path: Path) -> None:
    """Drawn by a seed, unless the checkpoint says that it is to be greedy."""
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0}')

    def tokens(model: Path, *given: str) -> list[int]:
        words = ("--max-tokens", "16", "--seed", "3", "--num-pages", "8", "--json", *given)
        return winnow("generate", model, "--token-ids", "1,2", *words).json["token_ids"]

    drawn, greedy = tokens(tiny), tokens(tiny, "--temperature", "0")
    assert drawn != greedy
    assert tokens(tmp_path / "model") == greedy
    assert tokens(tmp_path / "model", "--temperature", "1") == drawn


def test_stop_options_end_the_answer(tiny: Path) -> None:
    words = ("generate", tiny, "--prompt", "hello", "--max-tokens", "24", *GREEDY, "--json")
    whole = winnow(*words).json
    third = whole["token_ids"][2]
    by_id = winnow(*words, "--stop-id", str(third), "--stop-id", "9").json
    assert by_id["token_ids"] == whole["token_ids"][: whole["token_ids"].index(third) + 1]
    assert by_id["finish_reason"] == "stop"
    stop = next(c for c in whole["text"] if c.isascii())
    by_text = winnow(*words, "--stop", "never", "--stop", stop).json
    assert by_text["text"] == whole["text"].split(stop)[0]
    assert by_text["finish_reason"] == "stop"


def test_an_answer_under_a_schema_is_of_the_schema(tiny: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": ["x", 7]}, "maxItems": 4}')
    words = ("generate", tiny, "--prompt", "a", "--seed", "3", "--json-schema", schema, "--json")
    answer = winnow(*words).json
    assert answer["finish_reason"] == "stop"
    assert set(json.loads(answer["text"])) <= {"x", 7}
    schema.write_text('{"type": "arrray"}')
    assert 'Unsupported type "arrray"' in winnow(*words).err


def test_logprobs_come_one_entry_a_token(tiny: Path) -> None:
    words = ("--max-tokens", "3", *GREEDY, "--logprobs", "2", "--json")
    answer = winnow("generate", tiny, "--prompt", "hello", *words).json
    assert len(answer["logprobs"]) == 3
    for token, entry in zip(answer["token_ids"], answer["logprobs"], strict=True):
        (likeliest, first), (_, second) = entry["top"]
        assert likeliest == token
        assert entry["chosen"] == first >= second


@pytest.mark.parametrize("kv", ["model", "fp8", "nvfp4"])
@pytest.mark.parametrize("index", ["model", "fp8", "nvfp4"])
def test_every_pair_of_cache_formats_is_served_and_said(
    tiny: Path, caplog: pytest.LogCaptureFixture, kv: str, index: str
) -> None:
    caplog.set_level(logging.INFO)
    formats = ("--kv-format", kv, "--index-format", index)
    words = ("--token-ids", LONG_IDS, "--max-tokens", "2", *GREEDY, *formats, "--json")
    assert len(winnow("generate", tiny, *words).json["token_ids"]) == 2
    held = [name.replace("model", "fp32") for name in (kv, index)]
    assert f"KV {held[0]}, index {held[1]}, 16 pages" in caplog.text


@pytest.mark.parametrize(("dtype", "held"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_the_compute_dtype_is_the_one_asked_for(
    tiny: Path, caplog: pytest.LogCaptureFixture, dtype: str, held: str
) -> None:
    caplog.set_level(logging.INFO)
    words = ("--token-ids", "1", "--max-tokens", "1", "--dtype", dtype, *GREEDY)
    assert winnow("generate", tiny, *words).status == 0
    assert f"KV {held}, index {held}" in caplog.text


def test_any_number_of_step_tokens_gives_the_same_tokens(tiny: Path) -> None:
    words = ("--token-ids", LONG_IDS, "--max-tokens", "12", "--dtype", "float32", *GREEDY, "--json")
    answers = [
        winnow("generate", tiny, *words, "--max-step-tokens", str(budget)).json
        for budget in (37, 128, 4096)
    ]
    assert answers[1:] == answers[:1] * 2


def test_a_preset_is_served_with_random_weights_cut_to_layers(
    small_preset: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    words = (
        "generate",
        small_preset,
        "--random-weights",
        "--token-ids",
        "1,2,3",
        *GREEDY,
        "--json",
    )
    answers = [
        winnow(*words, "--max-tokens", "3", "--layers", str(layers)).json for layers in (2, 2, 4)
    ]
    assert answers[0] == answers[1]
    assert answers[0]["text"] is None
    row_bytes = [int(word) for word in re.findall(r"pages of (\d+) bytes", caplog.text)]
    assert row_bytes[0] * 2 > row_bytes[2] > row_bytes[0]


@pytest.mark.parametrize(
    ("layers", "free", "advice"),
    [
        (
            (),
            60e9,
            r"weights of 60 layers take 253\.6 GB, 60\.0 GB .* are free: .*\(--layers\) 1\d ",
        ),
        (("--layers", "1"), 1e9, r"weights of 1 layers take .* 1\.0 GB .* not even one layer fits"),
    ],
)
def test_a_preset_that_does_not_fit_says_how_many_layers_would(
    monkeypatch: pytest.MonkeyPatch,
    layers: Sequence[str],
    free: float,
    advice: str,
) -> None:
    monkeypatch.setattr(
        "winnow.model.checkpoint.random.free_memory_bytes", lambda device: int(free)
    )
    words = ("--random-weights", *layers, "--token-ids", "1")
    status, out, err = winnow("generate", "minimax-m3.1-flash", *words)
    assert (status, out) == (1, "")
    assert re.search(advice, err)


def test_a_cache_larger_than_the_memory_is_refused_with_what_fits(tiny: Path) -> None:
    words = ("--token-ids", "1", "--num-pages", str(10**12))
    status, _, err = winnow("generate", tiny, *words)
    assert status == 1
    fitting = re.search(r"lower num_pages \(--num-pages\) to (\d+)\n", err)
    assert fitting is not None
    assert 2 <= int(fitting[1]) < 10**12


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_one_sentence(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = winnow("generate", tiny, "--prompt", "x", "--device", device)
    assert (status, out) == (1, "")
    assert err == ("winnow: cuda needs an NVIDIA GPU and a CUDA build of torch; none was found\n")


def test_backends_say_which_module_serves_each_op_or_why_none_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answer = winnow("backends", "--json").json
    assert answer["cpu"]["serves"]
    assert answer["cpu"]["reason"] is None
    # The cases of norm and of linear check two ops each.
    assert set(answer["cpu"]["ops"]) == {*conformance.KERNEL_OPS, "add_norm", "head"}
    assert answer["cpu"]["ops"]["linear"] == "winnow.ops.linear.cpu"
    assert not answer["hopper"]["serves"]
    assert answer["hopper"]["ops"] == {}
    text = winnow("backends").out
    assert "cpu: serves every op\n" in text
    assert f"hopper: {answer['hopper']['reason']}\n" in text


def test_conformance_reports_each_op_and_ends_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "KERNEL_OPS", ("norm",))
    reports = winnow("bench", "conformance", "--json").json
    assert [report["op"] for report in reports] == ["codec", "norm"]
    assert all(not report["failed"] for report in reports)
    text = winnow("bench", "conformance", "--backend", "reference").out
    assert re.search(r"^norm +\d+ .*winnow\.ops\.norm\.reference \(\d+\)$", text, re.MULTILINE)


def test_a_backend_that_disagrees_is_named_and_the_status_is_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = kernels("cpu")
    wrong = replace(right, norm=lambda x, weight, eps: right.norm(x, weight, eps) * 1.01)
    monkeypatch.setattr(conformance, "KERNEL_OPS", ("norm",))
    monkeypatch.setattr(conformance, "kernels", lambda backend: wrong)
    status, out, _ = winnow("bench", "conformance")
    assert status == 1
    assert "FAILED norm: 1x96 fp32: out error 1.00e-02" in out


def test_a_made_checkpoint_can_be_converted_and_both_are_served(tmp_path: Path) -> None:
    plain, small = tmp_path / "plain", tmp_path / "deep" / "small"
    assert winnow("make-tiny", plain, "--seed", "5") == (0, f"{plain}\n", "")
    status, out, _ = winnow("convert", plain, small)
    before, after = (_tensor_bytes(directory) for directory in (plain, small))
    assert (status, out) == (
        0,
        f"{small}\n{before:,} bytes of tensors became {after:,} ({after / before:.1%})\n",
    )
    plans = [winnow("plan", directory, "--json").json for directory in (plain, small)]
    # 4.5 bits a value and 4 bytes a row against 16 bits a value.
    share = plans[1]["weights"]["experts"] / plans[0]["weights"]["experts"]
    assert share == pytest.approx(4.5 / 16, abs=0.02)
    for directory in (plain, small):
        words = ("--prompt", "hello", "--max-tokens", "3", *GREEDY, "--json")
        assert len(winnow("generate", directory, *words).json["token_ids"]) == 3


def _tensor_bytes(directory: Path) -> int:
    files = directory.glob("*.safetensors")
    return sum(tensor.nbytes for file in files for tensor in load_file(file).values())


def test_keep_leaves_values_and_so_tokens_as_they_are(tiny: Path, tmp_path: Path) -> None:
    words = ("--experts", "keep", "--linear", "keep")
    assert winnow("convert", tiny, tmp_path / "kept", *words).status == 0
    words = ("--prompt", "hello", "--max-tokens", "6", *GREEDY, "--json")
    answers = [winnow("generate", d, *words).json for d in (tiny, tmp_path / "kept")]
    assert answers[0] == answers[1]


def test_a_seed_makes_the_same_checkpoint_again(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert winnow("make-tiny", tmp_path / name, "--seed", seed).status == 0
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_the_module_is_the_command() -> None:
    done = process("--version")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"winnow {__version__}\n".encode(),
        b"",
    )


def test_standard_output_has_the_answer_alone_and_v_says_what_was_chosen(tiny: Path) -> None:
    words = ("--prompt-file", "-", "--max-tokens", "3", *GREEDY, "--json")
    quiet, chatty = (
        process(*verbose, "generate", tiny, *words, stdin=b"hello") for verbose in ((), ("-v",))
    )
    assert quiet.returncode == chatty.returncode == 0
    assert quiet.stdout == chatty.stdout
    assert len(json.loads(quiet.stdout)["token_ids"]) == 3
    assert quiet.stderr == b""
    assert b"winnow: backend cpu, KV fp32, index fp32, 16 pages of " in chatty.stderr


def test_a_terminal_without_a_character_shows_its_number(tiny: Path) -> None:
    words = ("generate", tiny, "--prompt", "hello", "--max-tokens", "24", *GREEDY)
    wide = process(*words, PYTHONIOENCODING="utf-8")
    narrow = process(*words, PYTHONIOENCODING="ascii")
    assert (narrow.returncode, narrow.stderr) == (0, b"")
    assert narrow.stdout == wide.stdout.decode().encode("ascii", "backslashreplace")
    assert narrow.stdout != wide.stdout


def test_a_reader_who_leaves_early_is_not_complained_of() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = process("plan", "minimax-m3", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("command", "option", "default"),
    [
        ("serve", "--port", "8000"),
        ("serve", "--max-queue", "256"),
        ("serve", "--request-timeout", "600"),
        ("generate", "--max-running", "256"),
        ("generate", "--kv-format", "model"),
        ("bench step", "--context", "4096"),
        ("bench serving", "--artifacts", "build/aiperf"),
        ("plan", "--memory-fraction", "0.9"),
    ],
)
def test_the_help_and_the_page_show_a_default_as_a_user_writes_it(
    command: str, option: str, default: str
) -> None:
    told = " ".join(winnow(*command.split(), "--help").out.split())
    _, found, after = told.partition(f" {option} ")
    assert found, told
    assert f"(default: {default})" in after.partition(" --")[0], after
    page = (Path(__file__).parents[1] / "docs/cli.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## winnow {command}\n(.*?)(?:^## |\Z)", page, re.M | re.S)
    assert re.search(rf"^\| `{option} [^`]*` \| `{re.escape(default)}` \|", section, re.M)


@pytest.mark.parametrize("command", ["bench serving", "bench kernels", "bench step"])
def test_help_shows_no_default_that_is_empty_or_no_users_word(command: str) -> None:
    told = " ".join(winnow(*command.split(), "--help").out.split())
    assert not re.search(r"default: (\)|\[|\{|None)", told), told


def test_the_page_marks_what_must_be_given() -> None:
    page = (Path(__file__).parents[1] / "docs/cli.md").read_text(encoding="utf-8")
    assert "| `--url URL` | required | Of the server" in page
    assert "| `DST` | required |" in page
    assert "| `--seed N` | `0` |" in page
