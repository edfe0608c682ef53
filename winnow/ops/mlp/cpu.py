"""`mlp` on a CPU: the reference's arithmetic over the fast `linear`."""

from torch import Tensor

from winnow.ops.linear.cpu import linear
from winnow.ops.mlp.reference import activation
from winnow.ops.weights import MlpWeights
from winnow.spec.model import ModelSpec


def mlp(x: Tensor, weights: MlpWeights, spec: ModelSpec) -> Tensor:
    """See `winnow.ops.mlp.Mlp`."""
    return linear(activation(linear(x, weights.gate_up), spec), weights.down)
