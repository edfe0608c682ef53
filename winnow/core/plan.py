"""What one step computes: the frozen data that crosses from the scheduler to the runner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """The rows of one request in a step: the tokens at positions [start, start + count)."""

    request_id: str
    start: int
    count: int
    pages: tuple[int, ...]
    """Page of each block of tokens [0, start + count). The step writes those from block
    `start // BLOCK_TOKENS` on, and reads all."""
    samples: bool
    """The last row is the last known token: its logits give the next one."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Without rows there is nothing to do."""

    rows: tuple[PlannedRows, ...] = ()
    preempted: tuple[str, ...] = ()
    """Requests that lost their pages to this plan; they wait and are computed again later."""

    @property
    def num_rows(self) -> int:
        return sum(rows.count for rows in self.rows)
