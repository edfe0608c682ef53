"""The meaning of `moe`: one row after another."""

import torch
from torch import Tensor

from winnow.ops.mlp.reference import mlp
from winnow.ops.weights import MlpWeights, MoeWeights, expert
from winnow.spec.model import ModelSpec


def route(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Chosen experts int64 [rows, k], best first, and their fp32 weights [rows, k]."""
    return choose(x.float() @ weights.router.T, weights.router_bias, spec)


def choose(logits: Tensor, bias: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """From router logits fp32 [rows, experts] to `route`'s result."""
    # Torch's fp32 sigmoid differs in its last bit between its vector loop and the loop's tail.
    scores = torch.sigmoid(logits.double()).float()
    ranked = (scores + bias).nan_to_num(nan=float("-inf"))
    # A stable sort leaves equal scores in the order of their experts.
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    chosen = order[:, : spec.experts_per_token]
    share = scores.gather(1, chosen)
    # Added one by one: torch's sum takes an order that depends on the number of rows.
    total = sum(share[:, 1:].unbind(1), share[:, 0])
    return chosen, share / total.unsqueeze(1) * spec.routed_scale


def moe(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> Tensor:
    """See `winnow.ops.moe.Moe`."""
    chosen, share = route(x, weights, spec)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for row in range(x.shape[0]):
        for slot in range(spec.experts_per_token):
            index = int(chosen[row, slot])
            one = MlpWeights(expert(weights.gate_up, index), expert(weights.down, index))
            out[row] += share[row, slot] * mlp(x[row : row + 1], one, spec)[0].float()
    return (out + mlp(x, weights.shared, spec).float()).to(x.dtype)
