"""Whether one engine's answers are another's when both made the same choices: row by row, with
nothing left out.

Owns the comparison of what benchmarks/gpu_notes.py noted with what benchmarks/gpu_forced.py
computed. Knows nothing of engines or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpu_forced import Forced
from gpu_notes import KINDS, Noted
from torch import Tensor

FARTHER = 1.1
"""How much farther from fp32 the median row of a GPU may be than that of the CPU in bf16."""


@dataclass(frozen=True)
class Bounds:
    """The most that two computations may differ by: a row of logits, relative; the lead of a logit,
    over its row's root mean square; of a router's score, which is from 0 to 1; of a block's score,
    as a share of it; what is stored of a token in a layer, relative, where it is given. And the
    median of the last that one of them has against fp32, as it was measured."""

    row: float
    lead: float
    experts: float
    blocks: float
    stored: float = 0.0
    stored_median: float = 0.0


class Agreement:
    """All rows of a case: what one side `noted`, and the same tokens after the same choices as
    another one computed them."""

    def __init__(self, noted: Sequence[Noted], given: Sequence[Forced]) -> None:
        self._pairs = list(zip(noted, given, strict=True))
        self.errors = row_errors([a.columns for a in noted], given)

    def bounds(self) -> Bounds:
        """For two engines that each differ from a third as these two differ: the most that anything
        is another one here, times the square root of 2."""
        leads = [(a.best[:, 0] - a.best[:, 1]) / a.rms - b.lead for a, b in self._pairs]
        # Where all are taken both sides' leads are infinite.
        moves = torch.cat([(a.leads - b.gaps).abs().nan_to_num(0.0) for a, b in self._pairs])
        experts, blocks = (
            2**0.5 * _most(moves[:, KINDS.index(kind) :: len(KINDS)])
            for kind in ("experts", "blocks")
        )
        return Bounds(
            2**0.5 * _most(self.errors),
            2**0.5 * _most(torch.cat(leads).abs()),
            experts,
            blocks,
            2**0.5 * _most(stored_errors([b for _, b in self._pairs])),
            _median(stored_errors([b for _, b in self._pairs])),
        )

    def report(self, title: str, bounds: Bounds, wide: Sequence[Forced], listed: int) -> bool:
        """Print every token that would be another one, as many as `listed` of the choices of a kind
        that would, the farthest first, and whether all is within the bounds. `wide`: the same
        computed in fp32."""
        tokens, choices = self._other_tokens(), self._other_choices()
        for place, behind in tokens:
            print(f"  {place}: the token is {behind:.4f} behind (may be {bounds.lead:.4f})")
        worst = {}
        for kind in KINDS:
            own = sorted((gap, place) for of, place, gap in choices if of == kind)
            may = getattr(bounds, kind)
            for gap, place in own[:listed]:
                print(f"  {place}: {kind} taken are {-gap:.1e} behind (may be {may:.1e})")
            worst[kind] = _most(-torch.tensor([gap for gap, _ in own]))
        behind = _most(torch.tensor([far for _, far in tokens]))
        beyond = int((~(self.errors <= bounds.row)).sum())
        others = sum(_not_the_largest(a) for a, _ in self._pairs)
        theirs, ours = (
            float(row_errors([pair[side].columns for pair in self._pairs], wide).median())
            for side in (0, 1)
        )
        stored = stored_errors([b for _, b in self._pairs])
        stored_most, stored_median = _most(stored), _median(stored_errors(wide))
        within = behind <= bounds.lead and all(worst[k] <= getattr(bounds, k) for k in KINDS)
        fine = within and beyond == 0 and others == 0 and theirs <= FARTHER * ours
        fine = fine and stored_most <= bounds.stored
        fine = fine and stored_median <= FARTHER * bounds.stored_median
        made = sum(int((~b.gaps.isposinf()).sum()) for _, b in self._pairs)
        print(
            f"{'ok' if fine else 'FAILED'}: {title}: {len(self.errors)} rows; "
            f"{len(self.errors) - len(tokens)} tokens are the CPU's, the others at most "
            f"{behind:.4f} behind it (may be {bounds.lead:.4f}); {others} are not the largest of "
            "their own logits\n"
            f"    logits, relative error of a row: {float(self.errors.median()):.1e} median, "
            f"{_most(self.errors):.1e} most (may be {bounds.row:.1e}: {beyond} rows are beyond); "
            f"against fp32 {theirs:.2e} median, of the CPU in bf16 {ours:.2e} (may be "
            f"{FARTHER:.1f} times that)\n"
            f"    choices: {len(choices)} of {made} would fall otherwise on the CPU, what was "
            f"taken at most {worst['experts']:.1e} behind (experts, may be {bounds.experts:.1e}) "
            f"and {worst['blocks']:.1e} (blocks, may be {bounds.blocks:.1e})",
            flush=True,
        )
        if len(stored):
            print(
                f"    stored, relative error of a token in a layer: {len(stored)} of them, "
                f"{_median(stored):.1e} median, {stored_most:.1e} most (may be "
                f"{bounds.stored:.1e}); against fp32 {stored_median:.2e} median, of the CPU in "
                f"bf16 {bounds.stored_median:.2e} (may be {FARTHER:.1f} times that)",
                flush=True,
            )
        return fine

    def _other_tokens(self) -> list[tuple[str, float]]:
        """Where the given token is not the largest logit's: place, and how far it is behind."""
        return [
            (f"prompt {number}, {int(a.length)} tokens: token {i}", float(b.behind[i]))
            for number, (a, b) in enumerate(self._pairs)
            for i in (b.behind != 0).nonzero().flatten().tolist()
        ]

    def _other_choices(self) -> list[tuple[str, str, float]]:
        """Where another choice would have been made: kind, place, and the gap, below 0."""
        return [
            (KINDS[depth % 2], f"prompt {number}, position {row}, sparse layer {depth // 2}", gap)
            for number, (_, b) in enumerate(self._pairs)
            for row, depth, gap in _below_zero(b.gaps)
        ]


def row_errors(got: Sequence[Tensor], want: Sequence[Forced]) -> Tensor:
    """Relative error of every row of logits, over the columns that were kept."""
    mine, theirs = torch.cat(list(got)), torch.cat([one.columns for one in want])
    found: Tensor = (mine - theirs).norm(dim=1) / theirs.norm(dim=1)
    return found


def stored_errors(given: Sequence[Forced]) -> Tensor:
    """Of every token and part that was given."""
    return torch.cat([one.stored.flatten() for one in given])


def _not_the_largest(noted: Noted) -> int:
    """Rows whose token is not one of the largest of the logits that it was taken from."""
    largest = (noted.ids == noted.tokens.unsqueeze(1)) & (noted.best == noted.best[:, :1])
    return int((~largest.any(1)).sum())


def _below_zero(gaps: Tensor) -> list[tuple[int, int, float]]:
    rows, depths = (~(gaps >= 0)).nonzero(as_tuple=True)
    return list(zip(rows.tolist(), depths.tolist(), gaps[rows, depths].tolist(), strict=True))


def _median(values: Tensor) -> float:
    return float(values.median()) if values.numel() else 0.0


def _most(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
