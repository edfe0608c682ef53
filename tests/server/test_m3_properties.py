"""The parser on texts that nobody thought of: any cut, any arguments, any garbage."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.m3_text import NS, answer, call, element, pieces, same

from winnow.server.m3_literals import may_be_literal
from winnow.server.m3_schema import KINDS

MODES = ("adaptive", "enabled", "disabled")
NAMES = ("s", "n", "l", "o", "u", "item")
WORDS = ("\n", " ", "1", "-", ".5", "e", "true", "null", "word", '"', "\\", "é", "[1]", '{"a": 1}')
FRAGMENTS = (
    *(
        "<mm:think>",
        "</mm:think>",
        f"{NS}<tool_call>",
        f"{NS}</tool_call>",
        NS,
        "]<]",
        "minimax[>[",
    ),
    *(f'{NS}<invoke name="f">', f'{NS}<invoke name="g">', f"{NS}</invoke>"),
    *(f"{NS}<{mark}{name}>" for name in NAMES for mark in ("", "/")),
    *WORDS,
)
FUNCTIONS: dict[str, Any] = {
    "f": {
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "l": {"type": "array", "items": {"type": ["string", "null"]}},
            "o": {"type": "object", "properties": {"s": {"type": "string"}, "l": {}}},
            "u": {"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "array"}]},
        }
    },
    "g": {},
}
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join)
elements = st.recursive(
    st.lists(st.sampled_from(WORDS), max_size=3).map("".join),
    lambda inner: st.lists(
        inner | st.tuples(st.sampled_from(NAMES), inner).map(lambda pair: element(*pair)),
        max_size=4,
    ).map("".join),
    max_leaves=8,
)
calls = st.one_of(texts, elements).map(call)
cuts = st.sets(st.integers(0, 400), max_size=40)


@given(
    text=texts | calls,
    where=cuts,
    mode=st.sampled_from(MODES),
    reason=st.sampled_from(("stop", "length")),
)
@settings(max_examples=300, deadline=None)
def test_any_cut_of_any_text_gives_the_same_answer_streamed_or_whole(
    text: str, where: set[int], mode: str, reason: str
) -> None:
    whole, streamed = answer([text], FUNCTIONS, mode, reason)
    assert same(whole, streamed)
    for parts in (pieces(text, where), list(text)):
        again, streamed_again = answer(parts, FUNCTIONS, mode, reason)
        assert again == whole
        assert same(again, streamed_again)


@given(text=texts | calls, mode=st.sampled_from(MODES))
@settings(max_examples=100, deadline=None)
def test_calls_of_an_answer_that_stopped_have_whole_arguments(text: str, mode: str) -> None:
    whole, _ = answer(list(text), FUNCTIONS, mode)
    for made in whole["message"].get("tool_calls", []):
        assert isinstance(json.loads(made["function"]["arguments"]), dict)


@given(
    text=st.text(st.characters(exclude_categories=("Cs",))).filter(lambda text: "<" not in text),
    mode=st.sampled_from(MODES),
)
@settings(max_examples=60, deadline=None)
def test_text_without_tags_comes_back_as_it_is(text: str, mode: str) -> None:
    message = answer(list(text), FUNCTIONS, mode)[0]["message"]
    told = message.get("reasoning_content", "") if mode == "enabled" else message["content"]
    assert told == text


def not_a_tag(text: str) -> bool:
    return NS not in text and not any(NS.startswith(text[i:]) for i in range(len(text)))


words = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(not_a_tag)
names = st.from_regex(r"[a-z_ é.-]{1,8}", fullmatch=True)
plain_words = words.filter(lambda w: not may_be_literal(w, KINDS))
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
mixed_enum = {"enum": ["red", "null", 3, True]}
leaves = st.one_of(
    st.tuples(st.just({"type": "string"}), words),
    st.tuples(st.just({"type": "integer"}), st.integers()),
    st.tuples(st.just({"type": "number"}), numbers),
    st.tuples(st.just({"type": "boolean"}), st.booleans()),
    st.tuples(st.just({"type": "null"}), st.none()),
    st.tuples(st.just({"type": ["string", "null"]}), st.none() | plain_words),
    st.tuples(st.just({"type": ["string", "integer"]}), st.integers() | plain_words),
    st.tuples(st.just(mixed_enum), st.sampled_from(mixed_enum["enum"])),
    st.tuples(st.just({}), plain_words.filter(bool) | numbers | st.booleans() | st.none()),
)


def lists(inner: Any) -> Any:
    """Lists of one schema: the values of the others are left out."""
    return st.lists(inner, max_size=4).map(
        lambda pairs: (
            {"type": "array", "items": pairs[0][0] if pairs else {"type": "string"}},
            [value for schema, value in pairs if schema == pairs[0][0]],
        )
    )


def objects(inner: Any) -> Any:
    return st.dictionaries(names.filter(lambda name: name != "item"), inner, max_size=4).map(
        lambda pairs: (
            {"type": "object", "properties": {name: schema for name, (schema, _) in pairs.items()}},
            {name: value for name, (_, value) in pairs.items()},
        )
    )


def nullable(inner: Any) -> Any:
    """A value that might have been null, where null cannot be taken for text."""
    return inner.filter(lambda pair: pair[0].get("type") in ("integer", "array", "object")).map(
        lambda pair: ({"anyOf": [{"type": "null"}, pair[0]]}, pair[1])
    )


schemas = st.recursive(leaves, lambda s: lists(s) | objects(s) | nullable(s), max_leaves=8)


@given(pair=objects(schemas), where=cuts)
@settings(max_examples=120, deadline=None)
def test_arguments_of_any_schema_come_back_as_they_were(
    pair: tuple[dict[str, Any], dict[str, Any]], where: set[int]
) -> None:
    schema, arguments = pair
    whole, _ = answer(pieces(call(arguments), where), {"f": schema})
    (made,) = whole["message"]["tool_calls"]
    assert whole["finish_reason"] == "tool_calls"
    assert json.loads(made["function"]["arguments"]) == arguments
