"""A request's tokens, keys and end."""

from __future__ import annotations

import pytest

from winnow.core.request import Request, State, num_blocks


def request(**fields):
    return Request("a", tuple(range(300)), **{"max_tokens": 4, **fields})


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (256, 2), (257, 3)]
)
def test_a_block_is_counted_from_its_first_token(tokens, blocks):
    assert num_blocks(tokens) == blocks


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 0), (0, 300), (10, 20), (290, 310), (300, 301), (305, 310), (0, 310)]
)
def test_token_ids_are_the_known_tokens_at_those_positions(start, stop):
    r = request(output=list(range(1000, 1010)))
    assert r.token_ids(start, stop) == r.tokens[start:stop]
    assert r.num_tokens == len(r.tokens) == 310


def test_a_stop_token_ends_the_request_and_stays_in_the_output():
    r = request(stop_ids=frozenset({7}))
    r.append(6)
    assert r.state is State.WAITING
    assert r.finish_reason is None
    r.append(7)
    assert (r.state, r.finish_reason, r.output) == (State.FINISHED, "stop", [6, 7])


def test_a_stop_token_before_min_tokens_does_not_end_the_request():
    r = request(stop_ids=frozenset({7}), min_tokens=3)
    r.append(7)
    r.append(7)
    assert not r.is_finished
    r.append(7)
    assert (r.finish_reason, r.output) == ("stop", [7, 7, 7])


def test_max_tokens_end_the_request_even_before_min_tokens():
    r = request(stop_ids=frozenset({7}), min_tokens=9, max_tokens=2)
    r.append(1)
    r.append(7)
    assert r.finish_reason == "length"


def test_a_stop_token_at_max_tokens_is_a_stop():
    r = request(stop_ids=frozenset({7}), max_tokens=1)
    r.append(7)
    assert r.finish_reason == "stop"


def test_without_stop_ids_only_the_length_ends_the_request():
    r = request(max_tokens=3)
    for _ in range(3):
        assert not r.is_finished
        r.append(7)
    assert r.finish_reason == "length"


def test_nothing_is_appended_to_a_finished_request():
    r = request(max_tokens=1)
    r.append(7)
    with pytest.raises(AssertionError):
        r.append(7)


def test_a_key_covers_every_token_before_the_end_of_its_block():
    first, second = request().key(0), request().key(1)
    other = Request("b", (9, *range(1, 300)), 4)
    assert other.key(0) != first
    assert other.key(1) != second
    longer = Request("c", tuple(range(256)), 4)
    assert (longer.key(0), longer.key(1)) == (first, second)


def test_generated_tokens_count_in_a_key_as_prompt_tokens_do():
    generated = Request("a", tuple(range(100)), 200, output=list(range(100, 128)))
    assert generated.key(0) == request().key(0)


def test_a_block_with_unknown_tokens_has_no_key():
    with pytest.raises(AssertionError):
        request().key(2)
