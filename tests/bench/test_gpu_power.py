"""What benchmarks/gpu_power.py makes of replays' times and of what nvidia-smi says."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def programme(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return import_module("gpu_power")


def test_a_line_of_nvidia_smi_is_read(programme: Any) -> None:
    seen = programme.parsed("1515, 3201, 748.31, 700.00, 0x0000000000000004\n", 7.5)
    assert seen == programme.Seen(7.5, 1515, 3201, 748.31, 700.0, 4)


def test_each_stretch_has_its_replays_and_what_was_seen_meanwhile(programme: Any) -> None:
    """Fast until the power limit holds the clock down; what was seen before is left out."""
    timings = [
        (100.0, 1040.0),
        (100.01, 1050.0),
        (100.3, 1170.0),
        (100.31, 1180.0),
        (103.0, 1175.0),
    ]
    seen = [
        programme.Seen(at, mhz, 3201, watts, 700.0, reasons)
        for at, mhz, watts, reasons in (
            (99.0, 345, 120.0, 1), (100.005, 1980, 300.0, 0),
            (100.25, 1530, 750.0, 4), (100.35, 1500, 740.0, 0x44),
        )
    ]  # fmt: skip
    head, first, held, last = programme.lines(timings, seen)
    assert head.split()[:2] == ["seconds", "replays"]
    assert first.split() == ["0.00-", "0.02", "2", "1045.0", "1980", "3201", "300", "of", "700"]
    words = "0.20- 0.40 2 1175.0 1515 3201 745 of 700 held by power in 2 of 2, heat in 1 of 2"
    assert held.split() == words.split()
    assert last.split() == ["1.60-", "3.20", "1", "1175.0"]


def test_the_workloads_that_are_timed_unless_others_are_named_exist(programme: Any) -> None:
    parser = argparse.ArgumentParser()
    assert tuple(programme.named(programme.DEFAULT, parser)) == programme.DEFAULT
    with pytest.raises(SystemExit):
        programme.named(["moe 3 tokens"], parser)
