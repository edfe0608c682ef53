"""The words of `winnow bench` and `winnow report`: what they make, and what they refuse."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.records import SYNTHETIC, load_point, record

from winnow.bench.record import append, load
from winnow.commands.bench import add_bench
from winnow.commands.report import add_report
from winnow.errors import RequestError

DATA = Path(__file__).with_name("data")
CONDITIONS = ["--formats", "kv=nvfp4,index=fp8", "--acceptance", "none", "--cache-state", "empty"]
SERVER = ["--machine", "a mock", "--server", "mock 1", "--commit", "abc"]


def run(*words: object) -> int:
    parser = argparse.ArgumentParser(prog="winnow")
    commands = parser.add_subparsers(required=True)
    add_bench(commands)
    add_report(commands)
    args = parser.parse_args([str(word) for word in words])
    status: int = args.run(args)
    return status


def test_an_import_becomes_records_under_the_conditions_that_were_said(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    words = ["bench", "import", "guidellm", DATA / "guidellm.json", "--workload", "fixed 64 to 8"]
    more = ["--parallel", "dep4", "--devices", 4, "--objective", "ttft=300,itl=30", "-o", out]
    assert run(*words, *CONDITIONS, *SERVER, *more) == 0
    found = {r.what: r for r in load(out)}
    conditions = found["goodput"].conditions
    assert conditions["formats"] == {"kv": "nvfp4", "index": "fp8"}
    assert conditions["parallel"] == {"plan": "dep4", "devices": 4}
    assert conditions["latency_objective"] == {"ttft_ms": 300.0, "itl_ms": 30.0}
    assert conditions["concurrency"] == 2
    assert found["goodput"].software == {"server": "mock 1", "client": "guidellm 0.8.1"}
    assert found["goodput"].machine == {"name": "a mock"}


@pytest.mark.parametrize(
    ("words", "acceptance"),
    [
        ("natural", {"kind": "natural"}),
        ("synthetic:3.16", {"kind": "synthetic", "mean_length": 3.16}),
        ("synthetic:0.9,0.8", {"kind": "synthetic", "rates": [0.9, 0.8]}),
        ("synthetic:0.9", {"kind": "synthetic", "rates": [0.9]}),
    ],
)
def test_acceptance_is_said_in_a_word(
    words: str, acceptance: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "r.jsonl"
    said = ["--formats", "kv=fp8", "--cache-state", "empty", "--acceptance", words]
    run("bench", "import", "vllm", DATA / "vllm.json", "--workload", "w", *said, *SERVER, "-o", out)
    assert load(out)[0].conditions["acceptance"] == acceptance


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--acceptance", "synthetic"], "is not none, natural"),
        (["--acceptance", "synthetic:0.5,1.5"], "not from 0 to 1"),
        (["--acceptance", "perfect"], "is not none, natural"),
        (["--formats", "nvfp4"], "is not NAME=a format"),
        (["--objective", "ttft=fast"], "is not NAME=MS"),
        (["--objective", "speed=3"], "use ttft, itl, e2e"),
        (["--objective", "ttft=-1"], "above 0"),
        (["--devices", "0"], "at least 1"),
    ],
)
def test_a_condition_that_means_nothing_is_refused_with_what_it_may_be(
    change: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "import", "vllm", DATA / "vllm.json", "--workload", "w"]
    with pytest.raises(SystemExit):
        run(*words, *CONDITIONS, *SERVER, *change)
    assert says in capsys.readouterr().err


def test_what_served_must_be_said_of_someone_else_s_figures() -> None:
    words = ["bench", "import", "vllm", DATA / "vllm.json", "--workload", "w", *CONDITIONS]
    with pytest.raises(RequestError, match="give --machine"):
        run(*words)
    with pytest.raises(RequestError, match="--server and --commit, both"):
        run(*words, "--machine", "m")
    with pytest.raises(RequestError, match="--server and --commit, both"):
        run(*words, "--machine", "m", "--server", "s")


def test_an_open_loop_needs_a_number_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "aiperf"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["bench", "serving", "--url", "http://127.0.0.1:1", "--request-rate", "2,4"]
    with pytest.raises(RequestError, match="give --requests"):
        run(*words, *CONDITIONS)


def plan(fits: bool) -> dict[str, Any]:
    """What `winnow plan --json` says, the fields that are read."""
    return {
        "version": 1,
        "settings": {
            "model": "minimax-m3", "gpu": "b300" if fits else None, "gpus": 4,
            "parallel": "dep4", "context": 262144, "kv": "nvfp4", "index": "fp8",
            "experts": "nvfp4", "linear": "mxfp8", "draft": 0, "memory_bytes": 288,
            "memory_fraction": 0.9, "reserve_bytes": 0, "charge_index": True,
        },
        "weight_bytes": 74,
        "token_bytes": {"kv": 34560, "index": 7680, "draft": 0},
        "fit": {"sequences": 64, "num_tokens": 4194304} if fits else None,
    }  # fmt: skip


def test_a_plan_becomes_records_of_capacity(tmp_path: Path) -> None:
    source, out = tmp_path / "plan.json", tmp_path / "r.jsonl"
    source.write_text(json.dumps({"version": 1, "plans": [plan(True), plan(False)]}))
    assert run("bench", "capacity", source, "-o", out) == 0
    found = [(r.what, r.median) for r in load(out)]
    assert found == [
        ("weights of one device", 74),
        ("cache of one token", 42240),
        ("sequences that fit", 64),
        ("tokens that fit in one group", 4194304),
        ("weights of one device", 74),
        ("cache of one token", 42240),
    ]
    assert load(out)[0].conditions["index_charged"] is True


def test_a_real_plan_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from winnow.cli import main

    assert main(["plan", "minimax-m3.1-flash", "--gpu", "h200", "--gpus", "8", "--json"]) == 0
    source = tmp_path / "plan.json"
    source.write_text(capsys.readouterr().out)
    assert run("bench", "capacity", source) == 0
    assert "sequences that fit" in capsys.readouterr().out


def test_a_plan_of_another_version_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "plan.json"
    source.write_text(json.dumps({**plan(True), "version": 2}))
    with pytest.raises(RequestError, match="is version 2 of a plan, this winnow reads 1"):
        run("bench", "capacity", source)
    source.write_text("{}")
    with pytest.raises(RequestError, match="no field 'version'"):
        run("bench", "capacity", source)


def test_steps_are_printed_with_parts_and_recorded(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    shape = ["--context", "40", "--batch", "1,2", "--steps", 2, "--repeats", 1, "--threads", 1]
    more = ["--max-step-tokens", 32, "--num-pages", 16, "-o", out]
    threads = torch.get_num_threads()
    assert run("bench", "step", tiny, *shape, *more) == 0
    torch.set_num_threads(threads)
    seen = capsys.readouterr().out
    assert "decode step, 2 rows, 2 x 40 tokens" in seen
    assert "selection" in seen
    records = load(out)
    assert len({r.run for r in records}) == 3
    assert {r.level for r in records} == {"step"}


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Path, Path]:
    natural, synthetic = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    append(natural, load_point(1, 100.0, 500.0))
    append(synthetic, load_point(1, 130.0, 600.0, conditions=SYNTHETIC))
    return natural, synthetic


def test_a_report_is_one_file(sets: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert run("report", *sets, "-o", out) == 0
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert run("report", *sets, "--compare", "-o", out) == 0
    assert "a.jsonl and b.jsonl" in out.read_text()


def test_pooling_is_one_number_or_the_reason_why_not(
    sets: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    what = "tokens per second per user"
    assert run("report", sets[0], "--pool", what) == 0
    assert capsys.readouterr().out == "100 tokens/s\n"
    with pytest.raises(RequestError, match=r"acceptance\.kind is 'natural' and 'synthetic'"):
        run("report", *sets, "--pool", what)
    with pytest.raises(RequestError, match="one frontier cannot hold"):
        run("report", *sets, "--one-frontier")


def test_bad_input_of_a_report_is_one_sentence(sets: tuple[Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"level": ')
    with pytest.raises(RequestError, match=r"broken\.jsonl:1: not a line of JSON"):
        run("report", broken)
    with pytest.raises(RequestError, match="takes two files of records, 1 were given"):
        run("report", sets[0], "--compare")
    append(broken.with_name("k.jsonl"), [record(level="kernel")])
    with pytest.raises(RequestError, match="no record of one side has a partner"):
        run("report", sets[0], broken.with_name("k.jsonl"), "--compare")
