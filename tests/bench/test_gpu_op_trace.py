"""What benchmarks/gpu_op_trace.py makes of a profiler's launches."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def programme(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return import_module("gpu_op_trace")


def event(name: str, start: float, duration: float, grid: int) -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": duration, "args": {"grid": [grid, 1, 1]}}


def test_what_kernels_add_is_the_time_of_a_call(programme: Any) -> None:
    """Two calls of 10 us: the second kernel begins within the first and ends 4 us after it."""
    events = [
        event(name, start + 10 * call, duration, grid)
        for call in range(2)
        for name, start, duration, grid in (("void score", 0, 6, 132), ("choose", 5, 5, 4))
    ]
    launches = import_module("gpu_step_trace").launches_of(events)
    head, score, choose, whole = programme.call_table(launches, 2).splitlines()
    assert head.split() == ["launches", "lasts", "adds"]
    assert score.split() == ["1.00", "6.00", "6.00", "score", "[132,", "1,", "1]"]
    assert choose.split() == ["1.00", "5.00", "4.00", "choose", "[4,", "1,", "1]"]
    assert whole == "  a call 10.0 us under the profiler"


def test_the_workloads_that_are_traced_unless_others_are_named_exist(programme: Any) -> None:
    parser = argparse.ArgumentParser()
    assert tuple(programme.named(programme.DEFAULT, parser)) == programme.DEFAULT
    with pytest.raises(SystemExit):
        programme.named(["moe 3 tokens"], parser)
