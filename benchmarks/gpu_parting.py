"""Where two engines' answers to the same prompts part, what came before, and what is rounding.

Owns the comparison of what benchmarks/gpu_notes.py notes. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpu_notes import KINDS, Noted
from torch import Tensor


@dataclass(frozen=True)
class Bounds:
    """Leads that rounding may turn: of a logit, over its row's root mean square, where the choices
    before it are the same and where they are not; of a router's score, which is from 0 to 1; of a
    block's score, as a share of it."""

    logits: float
    after: float
    experts: float
    blocks: float

    def token(self, clean: bool) -> float:
        return self.logits if clean else self.after

    def choice(self, depth: int) -> float:
        return float(getattr(self, KINDS[depth % 2]))


FP32 = Bounds(1e-4, 1e-4, 1e-4, 1e-4)


class Pair:
    """One prompt's answers, and what of them can be compared."""

    def __init__(self, want: Noted, got: Noted) -> None:
        self.want, self.got = want, got
        differ = (want.tokens != got.tokens).nonzero().flatten().tolist()
        self.place: int | None = differ[0] if differ else None
        """The first token that differs, None if none does; and the number of tokens up to it."""
        self.compared = len(want.tokens) if self.place is None else self.place + 1
        rows = int(want.length) + self.compared - 1
        self.unlike = (want.choices[:rows] != got.choices[:rows]).any(2)
        """Choices that differ, bool [rows, depths]; and those that follow from no other one: of
        less depth in their own row or in a row before."""
        depth = torch.arange(self.unlike.shape[1]).expand(self.unlike.shape)
        least = depth.masked_fill(~self.unlike, depth.shape[1]).amin(1).cummin(0).values
        self.free = depth <= least.unsqueeze(1)
        # What the last layer chooses reaches no other row.
        reach = self.unlike[:, : -len(KINDS)].any(1).cumsum(0).roll(1)
        reach[0] = 0
        self._clean = (reach == 0) & ~self.unlike.any(1)

    def clean(self, token: int) -> bool:
        """Whether no choice that a token follows from differs."""
        return bool(self._clean[int(self.want.length) + token - 1])

    def moves(self) -> Tensor:
        """How far the leads of choices are other ones, fp32 [rows, depths]; 0 where choices before
        them differ."""
        mine, theirs = (one.leads[: len(self.free)] for one in (self.want, self.got))
        # A choice that is another one moved past the tie.
        moved = torch.where(self.unlike, mine + theirs, (mine - theirs).abs())
        return moved.nan_to_num(0.0).masked_fill(~self.free, 0.0)  # infinite: all are taken

    def first(self) -> list[tuple[int, float]]:
        """Depth and lead of the choices that differ and follow from no other."""
        rows, depths = (self.unlike & self.free).nonzero(as_tuple=True)
        return list(zip(depths.tolist(), self.want.leads[rows, depths].tolist(), strict=True))

    def error(self, token: int) -> float:
        """Of a row's logits, relative, over the columns that were kept."""
        want, got = self.want.columns[token], self.got.columns[token]
        return float((got - want).norm() / want.norm())

    def moved(self, token: int) -> float:
        """How far the lead of one side's largest logit over its second is another one on the other
        side."""
        first, second = self.want.ids[token, :2]
        mine, theirs = (_lead(one, token, first, second) for one in (self.want, self.got))
        return abs(mine - theirs)


def _lead(noted: Noted, token: int, first: Tensor, second: Tensor) -> float:
    """Of one logit over another. One that is not among the best kept counts as the last of them, so
    that it may be farther, not nearer."""
    best, ids = noted.best[token], noted.ids[token]
    values = [
        best[ids == column] if bool((ids == column).any()) else best[-1:]
        for column in (first, second)
    ]
    return float((values[0] - values[1]) / noted.rms[token])


class Comparison:
    """All prompts' answers of two engines."""

    def __init__(self, want: Sequence[Noted], got: Sequence[Noted]) -> None:
        self.pairs = [Pair(a, b) for a, b in zip(want, got, strict=True)]

    def bounds(self) -> Bounds:
        """For two engines that each differ from a third as these two differ: the most that leads
        are moved here, times the square root of 2."""
        logits: dict[bool, float] = {True: 0.0, False: 0.0}
        choices = [0.0] * len(KINDS)
        for pair in self.pairs:
            for i in range(pair.compared):
                clean = pair.clean(i)
                logits[clean] = max(logits[clean], pair.moved(i))
            moves = pair.moves()
            for number in range(len(KINDS)):
                choices[number] = max(choices[number], float(moves[:, number :: len(KINDS)].max()))
        kinds = {kind: 2**0.5 * most for kind, most in zip(KINDS, choices, strict=True)}
        return Bounds(2**0.5 * logits[True], 2**0.5 * logits[False], **kinds)

    def report(self, title: str, bounds: Bounds | None) -> bool:
        """Print where answers part, and what came before; with bounds, whether all of it is
        rounding, which is returned."""
        errors: dict[bool, list[float]] = {True: [], False: []}
        leads: dict[bool, list[float]] = {True: [], False: []}
        first = {kind: [0.0] for kind in KINDS}
        for pair in self.pairs:
            for depth, lead in pair.first():
                first[KINDS[depth % 2]].append(lead)
            for i in range(pair.compared):
                errors[pair.clean(i)].append(pair.error(i))
            if pair.place is not None:
                leads[pair.clean(pair.place)].append(pair.want.lead(pair.place))
        verdict, within, fine = "", "", True
        if bounds is not None:
            self._list(bounds)
            tokens = all(max(leads[clean], default=0.0) <= bounds.token(clean) for clean in leads)
            ties = all(max(first[kind]) <= getattr(bounds, kind) for kind in KINDS)
            fine = tokens and ties
            verdict = "ok: " if fine else "FAILED: "
            within = (
                f" (leads may be: logits {bounds.logits:.4f}, after another choice "
                f"{bounds.after:.4f}, experts {bounds.experts:.1e}, blocks {bounds.blocks:.1e})"
            )
        parted = len(leads[True]) + len(leads[False])
        turned = sum(int(pair.unlike.sum()) for pair in self.pairs)
        starts = sum(len(pair.first()) for pair in self.pairs)
        print(
            f"{verdict}{title}{within}: {len(self.pairs) - parted} of {len(self.pairs)} answers "
            f"equal; {len(leads[True])} part with no other choice before, at leads of "
            f"{max(leads[True], default=0.0):.4f} of the row's root mean square at most, "
            f"{len(leads[False])} after one, at {max(leads[False], default=0.0):.4f}\n"
            f"    choices: {turned} differ, {starts} of them with none before, at leads of "
            f"{max(first['experts']):.1e} (experts) and {max(first['blocks']):.1e} (blocks) at "
            "most\n"
            f"    logits, relative error of a row: {spread(errors[True])} with no other choice "
            f"before, {spread(errors[False])} after one",
            flush=True,
        )
        return fine

    def _list(self, bounds: Bounds) -> None:
        """Each prompt whose answers part."""
        for number, pair in enumerate(self.pairs):
            if pair.place is None:
                continue
            clean = pair.clean(pair.place)
            said = f"lead {pair.want.lead(pair.place):.4f} (may be {bounds.token(clean):.4f}), "
            if clean:
                said += "no choice before it differs"
            else:
                depth, lead = pair.first()[0]
                said += (
                    f"{int(pair.unlike.sum())} choices before it differ, the first of "
                    f"{KINDS[depth % 2]} at a lead of {lead:.4f} (may be "
                    f"{bounds.choice(depth):.4f})"
                )
            print(f"  prompt {number}, {int(pair.want.length)} tokens: token {pair.place}, {said}")


def spread(values: Sequence[float]) -> str:
    if not values:
        return "no row"
    ranked = sorted(values)
    middle, most = ranked[len(ranked) // 2], ranked[-1]
    return f"{len(ranked)} rows, {middle:.1e} median, {most:.1e} most"
