"""`mlp` on Hopper over MXFP8 weights: two products of `winnow.ops.linear.hopper` and the general
activation between them. Owns no kernel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from winnow.ops.linear import hopper as products
from winnow.ops.mlp import Mlp
from winnow.ops.weights import MlpWeights
from winnow.spec.model import ModelSpec


def takes(x: Tensor, weights: MlpWeights, spec: ModelSpec) -> bool:
    """Whether both products are served by `winnow.ops.linear.hopper`."""
    return products.takes(x, weights.gate_up) and products.takes(x, weights.down)


def mlp(activation: Callable[[Tensor, ModelSpec], Tensor]) -> Mlp:
    """The op, with `activation` [rows, 2 * width] -> [rows, width] between the products."""

    def op(x: Tensor, weights: MlpWeights, spec: ModelSpec) -> Tensor:
        """See `winnow.ops.mlp.Mlp`."""
        gate_up = products.linear(x, weights.gate_up)
        return products.linear(activation(gate_up, spec), weights.down)

    op.__module__ = __name__
    return op
