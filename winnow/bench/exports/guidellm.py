"""guidellm's JSON report (0.8): one run for each benchmark in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from winnow.bench.exports.files import export_of, load_json
from winnow.bench.runs import Run, Timing
from winnow.errors import RequestError


def read(path: Path) -> list[Run]:
    """The runs of a report, in its order."""
    report = load_json(path)
    with export_of("guidellm", path):
        tool = f"guidellm {report['metadata']['guidellm_version']}"
        return [_run(tool, benchmark) for benchmark in report["benchmarks"]]


def _run(tool: str, benchmark: Mapping[str, Any]) -> Run:
    requests = benchmark["requests"]
    answered = requests["successful"]
    start = benchmark["scheduler_metrics"]["measure_start_time"]
    return Run(
        tool=tool,
        run=benchmark["config"]["id_"],
        duration_s=benchmark["duration"],
        requests=tuple(_timing(r, start) for r in answered if r["request_start_time"] >= start),
        warmup=tuple(_timing(r, start) for r in answered if r["request_start_time"] < start),
        failed=len(requests["errored"]),
        load=_load(benchmark["config"]["strategy"]),
    )


def _timing(request: Mapping[str, Any], start: float) -> Timing:
    if request["time_to_first_token_ms"] is None:
        raise RequestError("guidellm was run without streaming: no first token was timed")
    return Timing(
        start_s=request["request_start_time"] - start,
        ttft_ms=request["time_to_first_token_ms"],
        e2e_ms=request["request_latency"] * 1e3,
        input_tokens=request["prompt_tokens"],
        output_tokens=request["output_tokens"],
    )


def _load(strategy: Mapping[str, Any]) -> dict[str, Any]:
    match strategy["type_"]:
        case "synchronous":
            return {"concurrency": 1}
        case "concurrent":
            return {"concurrency": strategy["streams"]}
        case "constant" | "poisson" | "async":
            return {"concurrency": None, "request_rate": strategy["rate"]}
    raise RequestError(
        f"guidellm strategy {strategy['type_']!r} has neither a concurrency nor a request rate: "
        "use concurrent, synchronous, constant or poisson"
    )
