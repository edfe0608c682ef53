"""One measurement with everything it assumed, as a line of JSON. Measures nothing itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from winnow.bench.conditions import LEVELS, check_conditions
from winnow.errors import RequestError

__all__ = ["LEVELS", "Record", "append", "load"]

_OPTIONAL = ("run", "where")


@dataclass(frozen=True)
class Record:
    """`what` was measured, as `samples` in `unit`.

    `workload` says what was run and `conditions` under which formats, parallel plan, acceptance,
    cache state, concurrency and latency objective; `winnow.bench.conditions` has the rules.
    `machine` and `software` come from `winnow.bench.machine`. Records with the same `run` were
    measured together, sample by sample in the same order where they have one sample a request or
    a step. `where` is the file and line a record was read from. RequestError if anything is
    missing.
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
    run: str = ""
    where: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_conditions(self.level, self.conditions)
        for name in ("what", "unit", "samples", "workload", "machine", "software", "commit"):
            if not getattr(self, name):
                raise RequestError(f"a record of {self.what!r} without {name} says nothing")
        for sample in self.samples:
            if isinstance(sample, bool) or not isinstance(sample, int | float):
                raise RequestError(f"a sample of {self.what!r} is {sample!r}: give numbers")
            if not math.isfinite(sample):
                raise RequestError(f"a sample of {self.what!r} is {sample}: give finite numbers")

    @property
    def median(self) -> float:
        return median(self.samples)

    def percentile(self, percent: float) -> float:
        """The nearest-rank percentile: a sample that was seen, not one between two."""
        ranked = sorted(self.samples)
        return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]


def append(path: Path, records: Sequence[Record]) -> None:
    """Add records to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as lines:
        for record in records:
            line = {**asdict(record), "median": record.median}
            del line["where"]
            if not record.run:
                del line["run"]
            lines.write(json.dumps(line, sort_keys=True) + "\n")


def load(path: Path) -> list[Record]:
    """The records of a file of JSON lines. RequestError names the line that is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read as records: {error}") from error
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                records.append(replace(_parse(line), where=where))
            except RequestError as error:
                raise RequestError(f"{where}: {error}") from error
    if not records:
        raise RequestError(f"{path} holds no records: give a file of JSON lines")
    return records


def _parse(line: str) -> Record:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise RequestError(f"not a line of JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError(f"a record is a JSON object, this is a {type(found).__name__}")
    wanted = [f.name for f in fields(Record)]
    known = {*wanted, "median"}
    for name in found:
        if name not in known:
            raise RequestError(f"a record has no field {name!r}: it has {', '.join(wanted[:-1])}")
    missing = [name for name in wanted if name not in found and name not in _OPTIONAL]
    if missing:
        raise RequestError(f"a record without {', '.join(missing)} says nothing")
    for name, kind in _KINDS.items():
        if not isinstance(found[name], kind):
            raise RequestError(f"field {name} of a record is {found[name]!r}: give {kind.__name__}")
    found.pop("median", None)
    return Record(**{**found, "samples": tuple(found["samples"])})


_KINDS: dict[str, type] = {
    "samples": list,
    "workload": dict,
    "conditions": dict,
    "machine": dict,
    "software": dict,
}
