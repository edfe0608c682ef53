"""The result file of `vllm bench serve --save-result --save-detailed`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from winnow.bench.exports.files import export_of, load_json
from winnow.bench.runs import Run, Timing
from winnow.errors import RequestError

_DETAILS = ("ttfts", "itls", "input_lens", "output_lens", "errors")


def read(path: Path) -> list[Run]:
    """The one run of a result file. Its warm-up requests are not in it."""
    result = load_json(path)
    with export_of("vllm bench serve", path):
        missing = [name for name in _DETAILS if name not in result]
        if missing:
            raise RequestError(
                f"{path} has no {', '.join(missing)}: run vllm bench serve with --save-detailed, "
                "which keeps every request's timing"
            )
        return [_run(path, result)]


def _run(path: Path, result: Mapping[str, Any]) -> Run:
    errors = result["errors"]
    answered = [i for i, error in enumerate(errors) if not error]
    starts = result.get("start_times") or [0.0] * len(errors)
    begin = min((starts[i] for i in answered), default=0.0)
    return Run(
        tool="vllm bench serve",
        run=f"{path.stem}-{result['date']}",
        duration_s=result["duration"],
        requests=tuple(_timing(result, i, starts[i] - begin) for i in answered),
        warmup=(),
        failed=len(errors) - len(answered),
        load=_load(result),
    )


def _timing(result: Mapping[str, Any], i: int, start_s: float) -> Timing:
    ttft = result["ttfts"][i]
    return Timing(
        start_s=start_s,
        ttft_ms=ttft * 1e3,
        e2e_ms=(ttft + sum(result["itls"][i])) * 1e3,
        input_tokens=result["input_lens"][i],
        output_tokens=result["output_lens"][i],
    )


def _load(result: Mapping[str, Any]) -> dict[str, Any]:
    """A rate of "inf" sends everything at once, up to the concurrency."""
    concurrency, rate = result["max_concurrency"], float(result["request_rate"])
    if rate != float("inf"):
        return {"concurrency": concurrency, "request_rate": rate}
    return {"concurrency": concurrency or len(result["errors"])}
