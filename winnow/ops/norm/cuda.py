"""`norm` in Triton: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.ops.triton_codec import round_to


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `winnow.ops.norm.Norm`."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        _norm[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), eps, WIDTH=width, BLOCK=triton.next_power_of_2(width)
        )
    return out.view(x.shape)


@triton.jit
def _norm(x_ptr, weight_ptr, out_ptr, stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    x = tl.load(x_ptr + row * stride + lane, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + lane, mask=inside, other=0.0)
    # Exact operations, so that a row of zeros or of huge values ends as it does in the reference.
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 0), WIDTH * 1.0) + eps))
    out = round_to(x * scale * (1.0 + weight), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + lane, out, mask=inside)
