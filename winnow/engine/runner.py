"""Running a step: inputs, forward pass, sampling. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from winnow.core.plan import StepPlan
from winnow.core.request import Request
from winnow.engine.inputs import StepInputs, step_inputs
from winnow.engine.storage import PageStorage
from winnow.model.transformer import Transformer
from winnow.ops.sample import Sampled, SampleRow


class Runner:
    """One model over one storage."""

    def __init__(self, model: Transformer, storage: PageStorage) -> None:
        self.model = model
        self.storage = storage

    def inputs(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepInputs:
        """Tensors of a plan's rows, where the pages are."""
        return step_inputs(plan, requests).to(self.storage.rows.device)

    @torch.inference_mode()
    def logits(self, inputs: StepInputs) -> Tensor:
        """Run the rows through the model: fp32 [sampled requests, vocab_size]."""
        return self.model.forward(
            inputs.token_ids, inputs.batch, self.storage.layers, inputs.logit_rows
        )

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
        """One token a row of logits."""
        return self.model.kernels.sample(logits, rows)
