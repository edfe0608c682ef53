"""Matrix product with a weight in any format."""

from typing import Protocol

from torch import Tensor

from winnow.ops.weights import Weight


class Linear(Protocol):
    def __call__(self, x: Tensor, weight: Weight) -> Tensor:
        """x @ weight^T.

        `x` [rows, K] float32 or bfloat16; `weight` logically [N, K]. Returns [rows, N] in x's
        dtype. A quantised weight means its dequantised values rounded to x's dtype; sums are
        taken in fp32 or wider. Zero rows give an empty result; NaN and inf stay in their row.
        """
        ...
