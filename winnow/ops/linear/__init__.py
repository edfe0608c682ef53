"""Matrix product with a weight in any format."""

from typing import Protocol

from torch import Tensor

from winnow.ops.weights import PlainWeight, Weight


class Linear(Protocol):
    def __call__(self, x: Tensor, weight: Weight) -> Tensor:
        """x @ weight^T.

        `x` [rows, K] float32 or bfloat16; `weight` logically [N, K]. Returns [rows, N] in x's
        dtype. A quantised weight means its dequantised values rounded to x's dtype; sums are
        taken in fp32 or wider. Zero rows give an empty result; NaN and inf stay in their row.
        """
        ...


class Head(Protocol):
    def __call__(self, x: Tensor, weight: PlainWeight, out: Tensor | None) -> Tensor:
        """x @ weight^T in fp32: logits, which are compared with each other, are not rounded.

        `x` [rows, K] and `weight` [N, K] float32 or bfloat16, both the same. Returns fp32
        [rows, N]: `out`, contiguous, if given. As `Linear` otherwise.
        """
        ...
