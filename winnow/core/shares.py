"""How the rows of a step are shared among prompts. Arithmetic on counts; knows no requests."""

from __future__ import annotations

from collections.abc import Sequence

PART_BEHIND = 4
"""One in so many rows may go past a prompt that does not fit to those that arrived after it."""


def shares(needs: Sequence[int], rows: int, taken_behind: int = 0) -> tuple[int, ...]:
    """Rows of a step for each prompt; `needs` are the rows that each still lacks, all at least 1,
    in order of arrival, and `rows` those that are free.

    Whole prompts first, in their order. The first that does not fit leaves up to a quarter to
    those behind it, the shortest first, and takes the rest, so it always moves on.
    `taken_behind` rows of the step, not among `rows`, were given before to requests that arrived
    after the first prompt; they count against the quarter, or a stream of short prompts would come
    to fill the step with the tokens of their answers.
    """
    given: list[int] = []
    for need in needs:
        if need > rows:
            break
        given.append(need)
        rows -= need
    if len(given) == len(needs):
        return tuple(given)
    first, behind = needs[len(given)], needs[len(given) + 1 :]
    most = max(0, (rows + taken_behind) // PART_BEHIND - taken_behind)
    beside = _beside(first, behind, rows, most)
    return (*given, rows - sum(beside), *beside)


def _beside(first: int, behind: Sequence[int], rows: int, most: int) -> list[int]:
    """Rows for the prompts behind one that lacks `first` of the `rows`; `most` for them together.

    Only for those that end in a step in which the first does not, if the next steps are like this
    one: any other would end no sooner than if it had waited, and would hold the first up for that.
    """
    given = [0] * len(behind)
    left, ahead = most, 0
    for index in sorted(range(len(behind)), key=behind.__getitem__):
        ahead += behind[index]
        if not left or (-(-ahead // most) - 1) * (rows - most) + rows >= first:
            break
        given[index] = min(behind[index], left)
        left -= given[index]
    return given
