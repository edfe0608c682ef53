"""`mlp` on a GPU, and the activation that experts share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.ops.linear.cuda import linear
from winnow.ops.triton_codec import round_to
from winnow.ops.weights import MlpWeights
from winnow.spec.model import ModelSpec

_BLOCK = 1024


def mlp(x: Tensor, weights: MlpWeights, spec: ModelSpec) -> Tensor:
    """See `winnow.ops.mlp.Mlp`."""
    return linear(activation(linear(x, weights.gate_up), spec), weights.down)


def activation(gate_up: Tensor, spec: ModelSpec) -> Tensor:
    """[rows, 2 * width] -> [rows, width]; the formula of `winnow.ops.mlp.Mlp`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _activate[(rows, triton.cdiv(width, _BLOCK))](
            gate_up, out, spec.swiglu_alpha, spec.swiglu_limit, spec.swiglu_beta,
            WIDTH=width, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


@triton.jit
def activated(gate, up, alpha, limit, beta):
    """The activation of `winnow.ops.mlp.Mlp` on fp32 gate and up."""
    # Comparisons, as maxima and minima would lose a NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate * (1.0 / (1.0 + tl.exp(-alpha * gate))) * (up + beta)


@triton.jit
def _activate(
    gate_up_ptr, out_ptr, alpha, limit, beta, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = gate_up_ptr + row * 2 * WIDTH + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    out = round_to(activated(gate, up, alpha, limit, beta), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + column, out, mask=inside)
