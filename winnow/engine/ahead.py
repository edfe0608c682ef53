"""Guessing the next plan before the tokens of this one are known. Pure decisions.

A step of decode rows is mostly followed by the same rows, one token further. A guess that proves
wrong costs the device's time and nothing else: its rows write only to slots that lie past their
requests' computed tokens, in pages that no other request reads, and whatever comes to hold such a
page later is computed after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from winnow.core.plan import StepPlan
from winnow.core.request import Request
from winnow.spec.model import BLOCK_TOKENS


def next_plan(plan: StepPlan, requests: Mapping[str, Request]) -> StepPlan | None:
    """The plan after `plan` if every request goes on: None if one is known to end, to need another
    page, or to have more than one row. `requests` lack the tokens of `plan`."""
    rows = []
    for row in plan.rows:
        request, start = requests[row.request_id], row.start + 1
        ends = len(request.output) + 1 >= request.max_tokens
        if row.count != 1 or not row.samples or ends or start >= len(row.pages) * BLOCK_TOKENS:
            return None
        rows.append(replace(row, start=start))
    return StepPlan(tuple(rows)) if rows else None


def covers(guess: StepPlan, plan: StepPlan) -> bool:
    """Whether all rows of `plan` are among those of `guess`, which may have more."""
    guessed = {row.request_id: row for row in guess.rows}
    return bool(plan.rows) and all(guessed.get(row.request_id) == row for row in plan.rows)
