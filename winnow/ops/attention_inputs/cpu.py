"""`attention_inputs` on a CPU: the reference's arithmetic over the fast projection and codec."""

from __future__ import annotations

from torch import Tensor

from winnow.ops.attention_inputs.reference import run
from winnow.ops.batch import Batch
from winnow.ops.codec import cpu as codec
from winnow.ops.linear.cpu import linear
from winnow.ops.paged import LayerPages
from winnow.ops.weights import AttentionWeights
from winnow.spec.model import ModelSpec


def attention_inputs(
    x: Tensor,
    weights: AttentionWeights,
    spec: ModelSpec,
    rope: tuple[Tensor, Tensor],
    batch: Batch,
    pages: LayerPages,
) -> tuple[Tensor, Tensor | None]:
    """See `winnow.ops.attention_inputs.AttentionInputs`."""
    return run(linear, codec, x, weights, spec, rope, batch, pages)
