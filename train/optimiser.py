"""Muon for matrices, Adam for the rest, in one step. Knows parameters by name alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration that Muon uses (K. Jordan et al., 2024)."""


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Roughly the nearest semi-orthogonal matrix to each of [n, rows, columns], in bf16."""
    a, b, c = _COEFFICIENTS
    x: Tensor = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimiser:
    """Matrices of one shape are stepped together, as one batch.

    A matrix's update has root mean square 0.2 * rate whatever its shape (arXiv 2502.16982), and
    its weight decays by `decay` * rate.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        matrix_rate: float,
        adam_rate: float,
        decay: float,
    ) -> None:
        self.matrix_rate, self.decay = matrix_rate, decay
        named = list(named)
        self._groups: dict[tuple[int, ...], list[Tensor]] = {}
        for _, parameter in (pair for pair in named if is_matrix(*pair)):
            self._groups.setdefault(tuple(parameter.shape[-2:]), []).append(parameter)
        self._momenta = [[torch.zeros_like(p) for p in group] for group in self._groups.values()]
        rest = [p for name, p in named if not is_matrix(name, p)]
        fused = bool(rest) and rest[0].is_cuda
        self._rest = rest
        self._adam = torch.optim.Adam(rest, lr=adam_rate, betas=(0.9, 0.98), eps=1e-8, fused=fused)
        self._adam_rate = adam_rate

    @torch.no_grad()
    def step(self, factor: float, momentum: float = 0.95) -> None:
        """One update, rates times `factor`; then gradients are gone."""
        for group, momenta in zip(self._groups.values(), self._momenta, strict=True):
            gradients = [p.grad for p in group if p.grad is not None]
            torch._foreach_lerp_(momenta, gradients, 1 - momentum)
            ahead = torch._foreach_lerp(gradients, momenta, momentum)
            shape = group[0].shape[-2:]
            stacked = torch.cat([g.reshape(-1, *shape) for g in ahead])
            rate = self.matrix_rate * factor
            update = orthogonal(stacked).float() * (-0.2 * rate * max(shape) ** 0.5)
            counts = [p.numel() // (shape[0] * shape[1]) for p in group]
            parts = [u.reshape(p.shape) for u, p in zip(update.split(counts), group, strict=True)]
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, parts)
            for parameter in group:
                parameter.grad = None
        nn.utils.clip_grad_norm_(self._rest, 1.0)
        for settings in self._adam.param_groups:
            settings["lr"] = self._adam_rate * factor
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": self._momenta, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for own, stored in zip(self._momenta, state["momenta"], strict=True):
            for tensor, saved in zip(own, stored, strict=True):
                tensor.copy_(saved)
        self._adam.load_state_dict(state["adam"])


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon steps it: not the embedding, head, router or indexer, whose gradients are of
    another kind."""
    others = ("embed_tokens", "lm_head", ".gate.", "index_")
    return parameter.ndim >= 2 and not any(other in name for other in others)
