"""`moe` on a CPU: one grouped product over the experts that have rows. Experts are taken in
ascending order, so that a row's sum has one order whatever the other rows chose."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.ops.linear.cpu import grouped_linear, linear
from winnow.ops.mlp.cpu import activation, mlp
from winnow.ops.moe.reference import choose
from winnow.ops.weights import MoeWeights, PlainWeight
from winnow.spec.model import ModelSpec


def moe(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> Tensor:
    """See `winnow.ops.moe.Moe`."""
    shared = mlp(x, weights.shared, spec)
    if not x.shape[0]:
        return shared
    logits = linear(x.float(), PlainWeight(weights.router))
    chosen, share = choose(logits, weights.router_bias, spec)
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    experts, counts = (t.tolist() for t in flat[order].unique_consecutive(return_counts=True))
    rows = order // spec.experts_per_token
    hidden = activation(grouped_linear(x[rows], weights.gate_up, experts, counts), spec)
    parts = grouped_linear(hidden, weights.down, experts, counts).float()
    out = torch.zeros(x.shape, dtype=torch.float32)
    # index_add_ adds in the order of its index.
    out.index_add_(0, rows, parts * share.reshape(-1)[order].unsqueeze(-1))
    return (out + shared.float()).to(x.dtype)
