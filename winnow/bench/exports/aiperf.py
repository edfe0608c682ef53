"""AIPerf's artifact directory (0.13): profile_export.jsonl, its summary, the server's counters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from winnow.bench.exports.files import export_of, load_json, load_lines
from winnow.bench.runs import Run, Timing
from winnow.errors import RequestError

_HITS = "winnow_prefix_cache_hit_tokens"
_QUERIES = "winnow_prefix_cache_query_tokens"
SUMMARY = "profile_export_aiperf.json"
REQUESTS = "profile_export.jsonl"
COUNTERS = "server_metrics_export.json"


def read(directory: Path) -> list[Run]:
    """The one run of an artifact directory."""
    if not directory.is_dir():
        raise RequestError(f"{directory} is no directory: give AIPerf's artifact directory")
    summary = load_json(directory / SUMMARY)
    lines = load_lines(directory / REQUESTS)
    counters = directory / COUNTERS
    with export_of("AIPerf", directory):
        return [_run(summary, lines, load_json(counters) if counters.is_file() else None)]


def _run(summary: Any, lines: list[Any], counters: Any) -> Run:
    answered = [line for line in lines if _is_answered(line)]
    failed = [line for line in lines if not _is_answered(line)]
    measured = [line for line in answered if _phase(line) == "profiling"]
    begins = [line["metadata"]["request_start_ns"] for line in measured]
    start_ns = min(begins, default=0)
    return Run(
        tool=f"AIPerf {summary['aiperf_version']}",
        run=summary["benchmark_id"],
        duration_s=summary["benchmark_duration"]["avg"],
        requests=tuple(_timing(line, start_ns) for line in measured),
        warmup=tuple(_timing(line, start_ns) for line in answered if _phase(line) == "warmup"),
        failed=sum(_phase(line) == "profiling" for line in failed),
        load=_load(summary["input_config"]["phases"]),
        prefix=None if counters is None else _prefix(counters["metrics"]),
    )


def _is_answered(line: Mapping[str, Any]) -> bool:
    """Not so of a stream that broke off: AIPerf sees no error in it, but it has no usage."""
    metrics = line["metrics"]
    counted = "input_sequence_length" in metrics and "output_sequence_length" in metrics
    return line.get("error") is None and counted


def _phase(line: Mapping[str, Any]) -> Any:
    return line["metadata"]["benchmark_phase"]


def _timing(line: Mapping[str, Any], start_ns: int) -> Timing:
    metrics = line["metrics"]
    if "time_to_first_token" not in metrics:
        raise RequestError("AIPerf was run without --streaming: no first token was timed")
    return Timing(
        start_s=(line["metadata"]["request_start_ns"] - start_ns) / 1e9,
        ttft_ms=metrics["time_to_first_token"]["value"],
        e2e_ms=metrics["request_latency"]["value"],
        input_tokens=metrics["input_sequence_length"]["value"],
        output_tokens=metrics["output_sequence_length"]["value"],
    )


def _load(phases: list[Mapping[str, Any]]) -> dict[str, Any]:
    phase = next(phase for phase in phases if phase["kind"] == "profiling")
    if phase.get("rate") is not None:
        return {"concurrency": phase.get("concurrency"), "request_rate": phase["rate"]}
    return {"concurrency": phase["concurrency"]}


def _prefix(metrics: Mapping[str, Any]) -> tuple[float, float] | None:
    """What the prefix counters rose by in the measured window, over all servers."""
    if _HITS not in metrics or _QUERIES not in metrics:
        return None
    hits, queries = (
        sum(series["stats"]["total"] for series in metrics[name]["series"])
        for name in (_HITS, _QUERIES)
    )
    return hits, queries
