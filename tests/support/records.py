"""Records to test with: valid ones, and what to change in them."""

from __future__ import annotations

from typing import Any

from winnow.bench.record import Record

CONDITIONS: dict[str, Any] = {
    "formats": {"kv": "nvfp4", "index": "nvfp4"},
    "parallel": {"plan": "tp4", "devices": 4},
    "acceptance": {"kind": "natural"},
    "cache_state": "empty, prefix caching on",
    "concurrency": 8,
    "latency_objective": {"ttft_ms": 500.0},
}
SYNTHETIC = {"acceptance": {"kind": "synthetic", "mean_length": 3.16}}


def record(
    what: str = "time to first token",
    samples: tuple[float, ...] = (200.0, 220.0, 210.0),
    conditions: dict[str, Any] | None = None,
    **changes: Any,
) -> Record:
    """A serving record; `conditions` are put over those above, `changes` over the fields."""
    fields: dict[str, Any] = {
        "level": "serving",
        "unit": "ms",
        "workload": {"name": "chat", "phase": "measured"},
        "machine": {"gpus": ["NVIDIA H200"] * 4},
        "software": {"server": "winnow 0.1"},
        "commit": "0123456789ab",
        **changes,
    }
    return Record(
        what=what, samples=samples, conditions={**CONDITIONS, **(conditions or {})}, **fields
    )


def load_point(users: int, speed: float, throughput: float, **changes: Any) -> list[Record]:
    """The two records that make one point of a sweep."""
    conditions = {"concurrency": users, **changes.pop("conditions", {})}
    run = changes.pop("run", f"run-{users}-{speed}")
    shared = {"unit": "tokens/s", "run": run, "conditions": conditions, **changes}
    return [
        record("tokens per second per user", (speed,), **shared),
        record("total tokens per second per device", (throughput,), **shared),
    ]
