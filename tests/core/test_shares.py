"""The rows that prompts get, for any prompts and any step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.core.shares import shares

NEEDS = st.lists(st.integers(1, 3000) | st.integers(1, 9), max_size=12)
ROWS = st.integers(0, 2048) | st.integers(0, 12)


@pytest.mark.parametrize(
    ("needs", "rows", "expected"),
    [
        ([], 512, ()),
        ([9, 30], 0, (0, 0)),
        ([100, 412], 512, (100, 412)),
        ([100, 413], 512, (100, 412)),
        ([12_000, 40], 512, (472, 40)),
        ([12_000, 300], 512, (384, 128)),
        ([40, 12_000, 300], 512, (40, 354, 118)),
        ([12_000, 300, 100, 20], 512, (384, 8, 100, 20)),
        ([12_000, 100, 100], 512, (384, 100, 28)),
        ([12_000, 12_000, 40], 512, (472, 0, 40)),
        ([12_000, 40], 3, (3, 0)),
        ([12_000, 40], 4, (3, 1)),
        ([513, 300], 512, (512, 0)),
        ([897, 129], 512, (384, 128)),
        ([896, 129], 512, (512, 0)),
    ],
)
def test_a_step_is_shared_as_the_rule_says(needs, rows, expected):
    assert shares(needs, rows) == expected


@settings(deadline=None)
@given(NEEDS, ROWS, st.integers(0, 600))
def test_no_row_is_given_twice_and_none_is_left_while_a_prompt_lacks_it(needs, rows, taken):
    given = shares(needs, rows, taken)
    assert len(given) == len(needs)
    assert all(0 <= count <= need for count, need in zip(given, needs, strict=True))
    assert sum(given) == min(rows, sum(needs))


@settings(deadline=None)
@given(NEEDS.filter(len), ROWS, st.integers(0, 600))
def test_the_first_has_what_it_needs_or_three_quarters(needs, rows, taken):
    first = shares(needs, rows, taken)[0]
    assert first >= min(needs[0], rows - rows // 4)


@settings(deadline=None)
@given(NEEDS.filter(len), ROWS, st.integers(0, 600))
def test_with_rows_given_before_those_behind_have_a_quarter_together(needs, rows, taken):
    given = shares(needs, rows, taken)
    if given[0] < needs[0]:
        assert sum(given[1:]) <= max(0, (rows + taken) // 4 - taken)


@settings(deadline=None)
@given(NEEDS, ROWS)
def test_prompts_before_the_first_that_does_not_fit_are_computed_whole(needs, rows):
    given = shares(needs, rows)
    for index, need in enumerate(needs):
        if sum(needs[: index + 1]) > rows:
            break
        assert given[index] == need


@settings(deadline=None)
@given(NEEDS.filter(len), st.integers(1, 2048))
def test_every_prompt_ends_and_those_beside_the_first_end_before_it(needs, rows):
    left, beside, ended = list(needs), set(), {}
    for step in range(sum(needs)):
        live = [index for index, need in enumerate(left) if need]
        if not live:
            break
        given = dict(zip(live, shares([left[index] for index in live], rows), strict=True))
        if given.get(0, left[0]) < left[0]:
            beside |= {index for index in live[1:] if given[index]}
        for index, count in given.items():
            left[index] -= count
            if not left[index]:
                ended[index] = step
    assert not any(left)
    assert all(ended[index] < ended[0] for index in beside)


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 2048))
def test_of_two_prompts_the_second_ends_no_later_than_in_plain_order(first, other, rows):
    left, steps = [first, other], 0
    while left[1]:
        given = shares(left, rows) if left[0] else (0, *shares(left[1:], rows))
        left = [need - count for need, count in zip(left, given, strict=True)]
        steps += 1
    assert steps <= -(-(first + other) // rows)
