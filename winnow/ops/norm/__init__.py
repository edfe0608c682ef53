"""Root-mean-square norm in Gemma's form, alone or of a sum."""

from typing import Protocol

from torch import Tensor


class Norm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * (1 + weight) over the last axis, in fp32, rounded once.

        `x` [..., H] float32 or bfloat16; `weight` fp32 [H], where 0 is identity. Returns x's
        shape and dtype. Zero rows give an empty result; a row of zeros gives zeros; NaN and inf
        stay in their row.
        """
        ...


class AddNorm(Protocol):
    def __call__(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x + delta, rounded to their dtype, and the `norm` of that.

        `x` and `delta` [rows, H] of one dtype; `weight` as `Norm`'s. Returns two tensors of x's
        shape and dtype; x and delta are left as they are. Rows do not depend on each other.
        """
        ...
