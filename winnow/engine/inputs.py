"""From a step plan to tensors. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from winnow.core.plan import StepPlan
from winnow.core.request import Request
from winnow.ops.batch import Batch


@dataclass(frozen=True)
class StepInputs:
    """`token_ids` int64 [rows]; `logit_rows` int64 [n]: the last row of each of `sampled`."""

    token_ids: Tensor
    batch: Batch
    logit_rows: Tensor
    sampled: tuple[str, ...]

    def to(self, device: torch.device) -> StepInputs:
        """The same step with its tensors on another device."""
        return StepInputs(
            self.token_ids.to(device, non_blocking=True),
            self.batch.to(device),
            self.logit_rows.to(device, non_blocking=True),
            self.sampled,
        )


def step_inputs(plan: StepPlan, requests: Mapping[str, Request], width: int = 0) -> StepInputs:
    """The rows of a plan, in its order; block tables of `width` blocks at least."""
    token_ids: list[int] = []
    logit_rows: list[int] = []
    sampled: list[str] = []
    for rows in plan.rows:
        token_ids += requests[rows.request_id].token_ids(rows.start, rows.start + rows.count)
        if rows.samples:
            logit_rows.append(len(token_ids) - 1)
            sampled.append(rows.request_id)
    return StepInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        batch=Batch.of(
            starts=[r.start for r in plan.rows],
            counts=[r.count for r in plan.rows],
            block_tables=[[*r.pages, *[0] * (width - len(r.pages))] for r in plan.rows],
        ),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        sampled=tuple(sampled),
    )
