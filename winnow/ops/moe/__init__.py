"""A mixture-of-experts layer, from router to weighted sum."""

from typing import Protocol

from torch import Tensor

from winnow.ops.weights import MoeWeights
from winnow.spec.model import ModelSpec


class Moe(Protocol):
    def __call__(self, x: Tensor, weights: MoeWeights, spec: ModelSpec) -> Tensor:
        """Sum of each row's chosen experts, weighted, plus the shared expert.

        `x` [rows, hidden] -> [rows, hidden], same dtype. Router in fp32: s = sigmoid(x @
        router^T); the `experts_per_token` experts with the largest s + router_bias are chosen,
        the lower expert winning ties and NaN counting as the lowest; their weights are their own
        s (without the bias) divided by their sum, times `routed_scale`. The shared expert is
        added unscaled. Experts without rows cost nothing; zero rows give an empty result.
        """
        ...
