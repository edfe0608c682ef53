"""One measurement with everything it assumed, as a line of JSON. Measures nothing itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

LEVELS = ("capacity", "kernel", "layer", "step", "serving")
"""Kinds of result that must never be multiplied into one another."""


@dataclass(frozen=True)
class Record:
    """`what` was measured, as `samples` in `unit`.

    `workload` says what was run, `conditions` under which formats, acceptance, cache state and
    concurrency; both must be given. `machine` and `software` come from `winnow.bench.machine`.
    """

    level: str
    what: str
    unit: str
    samples: tuple[float, ...]
    workload: Mapping[str, Any]
    conditions: Mapping[str, Any]
    machine: Mapping[str, Any]
    software: Mapping[str, Any]
    commit: str

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level is {self.level!r}: use one of {', '.join(LEVELS)}")
        for name in ("samples", "workload", "conditions", "machine", "software", "commit"):
            if not getattr(self, name):
                raise ValueError(f"a record of {self.what!r} without {name} says nothing")

    @property
    def median(self) -> float:
        return median(self.samples)


def append(path: Path, records: Sequence[Record]) -> None:
    """Add records to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as lines:
        for record in records:
            line = {**asdict(record), "median": record.median}
            lines.write(json.dumps(line, sort_keys=True) + "\n")
