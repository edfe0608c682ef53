"""Driving AIPerf: the words it is given, and what becomes of what it leaves. A script stands in for
it that checks its words and leaves a stored export of the real one."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from support.mock_openai import MockServer, serving
from support.records import CONDITIONS

from winnow.bench import aiperf
from winnow.bench.aiperf import Load
from winnow.bench.combine import condition_sets
from winnow.bench.frontier import sweep
from winnow.bench.serving import Plan, Target, measure, target
from winnow.bench.workloads import Workload, workload
from winnow.errors import PeerError, RequestError, UnsupportedError

EXPORT = Path(__file__).with_name("data") / "aiperf"
SCRIPT = f"""\
#!{sys.executable}
import json, shutil, sys
words = sys.argv[1:]
def value(name): return words[words.index(name) + 1]
target = value("--output-artifact-dir")
shutil.copytree({str(EXPORT)!r}, target, dirs_exist_ok=True)
path = target + "/profile_export_aiperf.json"
summary = json.load(open(path))
summary["benchmark_id"] = target
for phase in summary["input_config"]["phases"]:
    phase["concurrency"] = int(value("--concurrency"))
json.dump(summary, open(path, "w"))
open(target + "/words", "w").write("\\n".join(words))
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a stand-in for aiperf on PATH; its file."""
    script = tmp_path / "bin" / "aiperf"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    return script


@pytest.fixture
def url() -> Iterator[str]:
    """A mock server in a thread."""
    ready, urls = threading.Event(), []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with serving(MockServer(0.0, 0.0)) as address:
            urls.append(address)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield urls[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def plan(chosen: Workload, *loads: Load) -> Plan:
    conditions = {k: v for k, v in CONDITIONS.items() if k != "concurrency"}
    return Plan(chosen, loads, conditions, {"name": "m"}, {"server": "s"}, "c")


HERE = Target("http://127.0.0.1:1", "m", "tokenizer")


def test_a_sweep_gives_points_of_one_condition_set(command: Path, tmp_path: Path) -> None:
    asked = plan(workload("fixed-256-64"), Load(2), Load(4))
    found = [r for records in measure(HERE, asked, tmp_path / "out") for r in records]
    measured = [r for r in found if r.workload["phase"] == "measured"]
    assert len(condition_sets(measured)) == 1
    assert sorted(point.load for point in sweep(found)) == ["2 at once, tp4", "4 at once, tp4"]
    assert found[0].software == {"server": "s", "client": "AIPerf 0.13.0"}


def test_aiperf_is_told_the_workload_and_no_more(command: Path, tmp_path: Path) -> None:
    list(measure(HERE, plan(workload("fixed-256-64"), Load(3)), tmp_path / "out"))
    words = (tmp_path / "out" / "load-0" / "words").read_text().split("\n")
    pairs = dict(pairwise(words))
    expected = {
        "--isl": "256",
        "--osl": "64",
        "--concurrency": "3",
        "--request-count": "24",
        "--warmup-request-count": "6",
        "--extra-inputs": "ignore_eos:true",
        "--random-seed": "1",
    }
    assert {name: pairs[name] for name in expected} == expected


def test_a_closed_loop_is_paced_and_still_a_closed_loop(command: Path, tmp_path: Path) -> None:
    """Without a rate AIPerf 0.13 spins on a core while its users wait for answers."""
    (records,) = measure(HERE, plan(workload("fixed-256-64"), Load(3)), tmp_path / "out")
    words = (tmp_path / "out" / "load-0" / "words").read_text().split("\n")
    assert int(words[words.index("--request-rate") + 1]) >= 200
    assert words[words.index("--arrival-pattern") + 1] == "constant"
    assert records[0].conditions["concurrency"] == 3
    assert "request_rate" not in records[0].conditions


def test_sessions_are_replayed_from_files_with_their_pauses(command: Path, tmp_path: Path) -> None:
    list(measure(HERE, plan(workload("agents-small"), Load(2)), tmp_path / "out"))
    words = (tmp_path / "out" / "load-0" / "words").read_text().split("\n")
    pairs = dict(pairwise(words))
    assert pairs["--custom-dataset-type"] == "weka_trace"
    assert len(list(Path(pairs["--input-file"]).glob("*.json"))) == 24
    assert (pairs["--num-sessions"], pairs["--num-warmup-sessions"]) == ("6", "2")
    assert words[words.index("--use-think-time-only") + 1].startswith("--")


def test_arrivals_at_a_rate_are_an_open_loop() -> None:
    words = aiperf.arguments("u", "m", "t", Load(rate=2.5), {}, {}, [], 1, Path("a"))
    assert words[words.index("--request-rate") + 1] == "2.5"
    assert "poisson" in words
    assert "--concurrency" not in words


def test_an_earlier_run_is_not_mixed_with_a_new_one(command: Path, tmp_path: Path) -> None:
    asked = plan(workload("fixed-256-64"), Load(2))
    list(measure(HERE, asked, tmp_path / "out"))
    with pytest.raises(RequestError, match="holds an earlier run"):
        list(measure(HERE, asked, tmp_path / "out"))


def test_a_failure_of_aiperf_is_its_own_last_words(command: Path, tmp_path: Path) -> None:
    command.write_text(f"#!{sys.executable}\nprint('fine')\nraise SystemExit('Error: no model')")
    with pytest.raises(PeerError, match="status 1: Error: no model"):
        aiperf.profile(["profile"], tmp_path / "out", 60)


def test_an_aiperf_that_does_not_end_is_stopped(command: Path, tmp_path: Path) -> None:
    command.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)")
    with pytest.raises(PeerError, match=r"was not done after 0\.5 s"):
        aiperf.profile(["profile"], tmp_path / "out", 0.5)


def test_without_aiperf_one_sentence_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UnsupportedError, match=r"pip install 'winnow-llm\[bench\]'"):
        aiperf.find()


def test_the_server_is_asked_for_its_model(url: str, tmp_path: Path) -> None:
    assert target(f"{url}/", None, "words") == Target(url, "mock", "words")
    with pytest.raises(RequestError, match="'mock', which is no directory"):
        target(url, None, None)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert target(url, str(tmp_path), None).tokenizer == str(tmp_path)


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(PeerError, match=r"does not answer .* start the server first"):
        target("http://127.0.0.1:1", None, None)
