"""The meaning of `mlp`, and the activation that experts share."""

import torch
from torch import Tensor

from winnow.ops.linear.reference import linear
from winnow.ops.weights import MlpWeights
from winnow.spec.model import ModelSpec


def activation(gate_up: Tensor, spec: ModelSpec) -> Tensor:
    """[..., 2 * width] -> [..., width]; the formula of `winnow.ops.mlp.Mlp`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=spec.swiglu_limit)
    up = up.clamp(min=-spec.swiglu_limit, max=spec.swiglu_limit)
    out = gate * torch.sigmoid(gate * spec.swiglu_alpha) * (up + spec.swiglu_beta)
    return out.to(gate_up.dtype)


def mlp(x: Tensor, weights: MlpWeights, spec: ModelSpec) -> Tensor:
    """See `winnow.ops.mlp.Mlp`."""
    return linear(activation(linear(x, weights.gate_up), spec), weights.down)
