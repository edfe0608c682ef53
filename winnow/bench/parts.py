"""From the records of one kind of step to where its time goes, in figures that add up.

Medians of parts do not add up to the median of the whole. Means do, but one step that the system
interrupted spoils them. So: means over the middle half of the steps, by length of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from winnow.bench.record import Record

WHOLE = "whole"


def broken_down(records: Sequence[Record]) -> list[list[Record]]:
    """The runs among step records that have a whole, its parts, and all of the same steps."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        if record.run and "part" in record.workload:
            runs.setdefault(record.run, []).append(record)
    return [
        own
        for own in runs.values()
        if len(own) > 1
        and any(record.workload["part"] == WHOLE for record in own)
        and len({len(record.samples) for record in own}) == 1
    ]


def breakdown(records: Sequence[Record]) -> tuple[float, dict[str, float]]:
    """The whole and its parts, largest first, each the mean over the same steps.

    `records` are those of one `run` that `winnow.bench.step` made: one of each part, step by step
    in the same order.
    """
    samples = {record.workload["part"]: record.samples for record in records}
    whole = samples.pop(WHOLE)
    ranked = sorted(range(len(whole)), key=lambda i: whole[i])
    out = len(ranked) // 4
    middle = ranked[out : len(ranked) - out]
    means = {part: fmean(values[i] for i in middle) for part, values in samples.items()}
    largest = dict(sorted(means.items(), key=lambda item: -item[1]))
    return fmean(whole[i] for i in middle), largest
