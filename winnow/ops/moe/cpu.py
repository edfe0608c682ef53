"""`moe` on a CPU: one pass over the experts that have rows, in ascending order, so that a row's
sum has one order whatever the other rows chose."""

import torch
from torch import Tensor

from winnow.ops.linear.cpu import linear
from winnow.ops.mlp.cpu import mlp
from winnow.ops.moe.reference import choose
from winnow.ops.weights import MlpWeights, MoeWeights, PlainWeight, expert
from winnow.spec.model import ModelSpec


def moe(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> Tensor:
    """See `winnow.ops.moe.Moe`."""
    logits = linear(x.float(), PlainWeight(weights.router))
    chosen, share = choose(logits, weights.router_bias, spec)
    out = torch.zeros(x.shape, dtype=torch.float32)
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=spec.num_experts).tolist()
    rows_in_order = order // spec.experts_per_token
    share_in_order = share.reshape(-1)[order].unsqueeze(-1)
    start = 0
    for index, count in enumerate(counts):
        if not count:
            continue
        piece = slice(start, start + count)
        rows = rows_in_order[piece]
        one = MlpWeights(expert(weights.gate_up, index), expert(weights.down, index))
        out.index_add_(0, rows, mlp(x[rows], one, spec).float() * share_in_order[piece])
        start += count
    return (out + mlp(x, weights.shared, spec).float()).to(x.dtype)
