"""One gated MLP: the dense layers' and the shared expert's."""

from typing import Protocol

from torch import Tensor

from winnow.ops.weights import MlpWeights
from winnow.spec.model import ModelSpec


class Mlp(Protocol):
    def __call__(self, x: Tensor, weights: MlpWeights, spec: ModelSpec) -> Tensor:
        """down(act(gate_up(x))).

        `x` [rows, hidden] -> [rows, hidden], same dtype. With [gate | up] = gate_up(x):
        g = min(gate, limit), u = clamp(up, -limit, limit), act = g * sigmoid(alpha * g) *
        (u + beta), in fp32, rounded to x's dtype. Zero rows give an empty result.
        """
        ...
