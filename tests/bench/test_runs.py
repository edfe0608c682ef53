"""The serving metrics by hand, and other tools' exports: real ones of a server of known delays.

The server was tests/support/mock_openai.py: 200 ms to the first token, 20 ms between tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from support.records import CONDITIONS

from winnow.bench.exports import READERS
from winnow.bench.record import Record
from winnow.bench.runs import Run, Timing, serving_records
from winnow.errors import RequestError

DATA = Path(__file__).with_name("data")
EXPORTS = {
    "aiperf": DATA / "aiperf",
    "guidellm": DATA / "guidellm.json",
    "vllm": DATA / "vllm.json",
}


def records_of(run: Run, **conditions: Any) -> dict[tuple[str, str], Record]:
    """By phase and metric."""
    own = {k: v for k, v in CONDITIONS.items() if k != "concurrency"} | conditions
    found = serving_records(run, {"name": "x"}, own, {"name": "m"}, {"server": "s"}, "c")
    return {(record.workload["phase"], record.what): record for record in found}


def test_metrics_of_two_requests_are_those_worked_out_by_hand() -> None:
    requests = (Timing(1.0, 100.0, 300.0, 50, 5), Timing(0.0, 200.0, 200.0, 30, 1))
    run = Run("tool", "r", 2.0, requests, (), 1, {"concurrency": 2}, prefix=(20.0, 80.0))
    found = records_of(run, latency_objective={"ttft_ms": 150.0, "itl_ms": 50.0})
    value = {what: record.samples for (_, what), record in found.items()}
    assert value["request start"] == (0.0, 1.0)
    assert value["time to first token"] == (200.0, 100.0)
    assert value["inter-token latency"] == (50.0,)
    assert value["tokens per second per user"] == (20.0,)
    assert value["total tokens per second"] == (43.0,)
    assert value["total tokens per second per device"] == (43.0 / 4,)
    assert value["output tokens per second per device"] == (6.0 / 2 / 4,)
    assert value["goodput"] == (0.5,)
    assert value["prefix-hit rate"] == (0.25,)
    assert value["failed requests"] == (1,)
    assert {record.run for record in found.values()} == {"r"}
    assert {record.conditions["concurrency"] for record in found.values()} == {2}


def test_goodput_is_not_made_up_without_an_objective() -> None:
    run = Run("tool", "r", 2.0, (Timing(0, 1, 2, 3, 4),), (), 0, {"concurrency": 1})
    found = records_of(run, latency_objective={})
    assert ("measured", "goodput") not in found
    assert ("measured", "prefix-hit rate") not in found


def test_a_run_without_an_answer_is_an_error() -> None:
    with pytest.raises(RequestError, match=r"no answered request \(7 failed\)"):
        records_of(Run("tool", "r", 2.0, (), (), 7, {"concurrency": 1}))


@pytest.mark.parametrize("tool", EXPORTS)
def test_known_delays_are_measured_within_five_per_cent(tool: str) -> None:
    (run,) = READERS[tool](EXPORTS[tool])
    found = records_of(run)
    assert found["measured", "time to first token"].median == pytest.approx(200, rel=0.05)
    assert found["measured", "inter-token latency"].median == pytest.approx(20, rel=0.05)
    assert found["measured", "request latency"].median == pytest.approx(200 + 7 * 20, rel=0.05)
    assert found["measured", "tokens per second per user"].median == pytest.approx(50, rel=0.05)
    assert found["measured", "output tokens"].samples == (8,) * 8
    assert run.load == {"concurrency": 2}
    assert run.failed == 0


def test_our_figures_of_an_aiperf_run_are_its_own() -> None:
    (run,) = READERS["aiperf"](EXPORTS["aiperf"])
    theirs = json.loads((EXPORTS["aiperf"] / "profile_export_aiperf.json").read_text())
    objective = {"ttft_ms": 300.0, "itl_ms": 30.0}
    parallel = {"plan": "tp1", "devices": 1}
    found = records_of(run, parallel=parallel, latency_objective=objective)
    for what, name in (
        ("time to first token", "time_to_first_token"),
        ("inter-token latency", "inter_token_latency"),
        ("request latency", "request_latency"),
        ("tokens per second per user", "output_token_throughput_per_user"),
    ):
        assert found["measured", what].median == pytest.approx(theirs[name]["p50"], rel=1e-6)
    for what, name in (
        ("total tokens per second", "total_token_throughput"),
        ("output tokens per second per device", "output_token_throughput"),
        ("goodput", "goodput"),
    ):
        # AIPerf divides by its phase, which begins and ends outside its requests.
        assert found["measured", what].median == pytest.approx(theirs[name]["avg"], rel=0.03)


def test_an_aiperf_run_at_a_rate_is_an_open_loop(tmp_path: Path) -> None:
    def change(copy: Path) -> None:
        path = copy / "profile_export_aiperf.json"
        summary = json.loads(path.read_text())
        summary["input_config"]["phases"] = [
            {"kind": "warmup", "type": "poisson", "requests": 2, "rate": 9.0},
            {"kind": "profiling", "type": "poisson", "requests": 8, "rate": 5.0},
        ]
        path.write_text(json.dumps(summary))

    (run,) = READERS["aiperf"](broken(change)(tmp_path))
    assert run.load == {"concurrency": None, "request_rate": 5.0}


def test_a_stream_that_broke_off_or_an_error_is_a_failed_request(tmp_path: Path) -> None:
    def change(copy: Path) -> None:
        path = copy / "profile_export.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        del lines[-1]["metrics"]["input_sequence_length"]
        lines[-2]["error"] = {"message": "connection reset"}
        path.write_text("\n".join(map(json.dumps, lines)))

    (run,) = READERS["aiperf"](broken(change)(tmp_path))
    assert (len(run.requests), run.failed) == (6, 2)


def test_warm_up_requests_stay_out_of_the_measured_ones() -> None:
    (run,) = READERS["aiperf"](EXPORTS["aiperf"])
    found = records_of(run)
    assert len(found["measured", "time to first token"].samples) == 8
    assert len(found["warm-up", "time to first token"].samples) == 2
    assert max(found["warm-up", "request start"].samples) < 0
    assert ("warm-up", "total tokens per second") not in found


def test_the_prefix_hit_rate_is_that_of_the_server_s_counters() -> None:
    (run,) = READERS["aiperf"](EXPORTS["aiperf"])
    # The mock says that half of each prompt's words, rounded down, were hits.
    assert 0.4 < records_of(run)["measured", "prefix-hit rate"].median <= 0.5


def vllm_result(**changes: Any) -> dict[str, Any]:
    """The fields of `vllm bench serve --save-detailed` that matter, of three requests."""
    return {
        "date": "20261101-120000",
        "max_concurrency": 2,
        "request_rate": "inf",
        "duration": 1.5,
        "input_lens": [10, 20, 30],
        "output_lens": [3, 3, 0],
        "ttfts": [0.2, 0.3, 0.0],
        "itls": [[0.02, 0.04], [0.03, 0.03], []],
        "start_times": [7.0, 7.1, 7.2],
        "errors": ["", "", "Bad Request"],
        **changes,
    }


def test_a_detailed_vllm_result_keeps_every_request_and_counts_the_failed(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(vllm_result()))
    (run,) = READERS["vllm"](path)
    assert [t.e2e_ms for t in run.requests] == pytest.approx([260.0, 360.0])
    assert median(t.itl_ms or 0 for t in run.requests) == pytest.approx(30.0)
    assert [t.start_s for t in run.requests] == pytest.approx([0.0, 0.1])
    assert (run.failed, run.load) == (1, {"concurrency": 2})
    path.write_text(json.dumps(vllm_result(request_rate=4.0, max_concurrency=None)))
    (run,) = READERS["vllm"](path)
    assert run.load == {"concurrency": None, "request_rate": 4.0}


def broken(change: Callable[[Path], None]) -> Callable[[Path], Path]:
    """A copy of the AIPerf export with a fault in it."""

    def make(directory: Path) -> Path:
        copy = directory / "export"
        shutil.copytree(EXPORTS["aiperf"], copy)
        change(copy)
        return copy

    return make


def summary_without(name: str) -> Callable[[Path], None]:
    def change(copy: Path) -> None:
        path = copy / "profile_export_aiperf.json"
        path.write_text(
            json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != name})
        )

    return change


def no_streaming(copy: Path) -> None:
    path = copy / "profile_export.jsonl"
    path.write_text(path.read_text().replace("time_to_first_token", "time_to_something"))


def cut(copy: Path) -> None:
    path = copy / "profile_export.jsonl"
    path.write_text(path.read_text()[:-100])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (broken(summary_without("benchmark_duration")), "no field 'benchmark_duration'"),
        (broken(no_streaming), "without --streaming"),
        (broken(cut), "profile_export.jsonl:10 is not a line of JSON"),
        (lambda directory: directory / "none", "is no directory"),
        (lambda directory: directory, "cannot be read"),
    ],
)
def test_a_broken_aiperf_export_is_one_sentence(
    make: Callable[[Path], Path], says: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=says):
        READERS["aiperf"](make(tmp_path))


@pytest.mark.parametrize(
    ("tool", "content", "says"),
    [
        ("guidellm", {"benchmarks": []}, "no field 'metadata'"),
        ("guidellm", [], "no export of guidellm"),
        ("vllm", {"duration": 3}, "--save-detailed"),
        ("vllm", vllm_result(ttfts=[0.1]), "no export of vllm bench serve"),
    ],
)
def test_another_tool_s_broken_export_is_one_sentence(
    tool: str, content: Any, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "export.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RequestError, match=says):
        READERS[tool](path)
    path.write_text("{")
    with pytest.raises(RequestError, match="is not JSON"):
        READERS[tool](path)
