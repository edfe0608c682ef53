"""`mlp` on a CPU, and the activation that experts share: in fp32 one pass in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.ops.linear.cpu import linear
from winnow.ops.mlp import reference
from winnow.ops.native import library, threads
from winnow.ops.weights import MlpWeights
from winnow.spec.model import ModelSpec


def mlp(x: Tensor, weights: MlpWeights, spec: ModelSpec) -> Tensor:
    """See `winnow.ops.mlp.Mlp`."""
    return linear(activation(linear(x, weights.gate_up), spec), weights.down)


def activation(gate_up: Tensor, spec: ModelSpec) -> Tensor:
    """[rows, 2 * width] -> [rows, width]; the formula of `winnow.ops.mlp.Mlp`."""
    if gate_up.dtype is not torch.float32:
        return reference.activation(gate_up, spec)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width)
    library().winnow_activation(
        gate_up.data_ptr(), rows, width, spec.swiglu_alpha, spec.swiglu_limit, spec.swiglu_beta,
        out.data_ptr(), threads(),
    )  # fmt: skip
    return out
