"""What the parser makes of answers: sections, calls, and calls that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.m3_text import NS, answer, block, call, element, invoke, same

from winnow.server.chat_request import ChatRequest
from winnow.server.events import CallArguments, Content, Event, Reasoning
from winnow.server.m3_parser import M3Parser, chat_parser, new_call_id
from winnow.server.protocol import parse

THINK = "<mm:think>"
UNTHINK = "</mm:think>"
F = {"f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}


def read(text: str, mode: str = "disabled", reason: str = "stop", **functions: Any) -> Any:
    """The message and its finish reason, the same in every form."""
    whole, streamed = answer([text], functions or F, mode, reason)
    assert same(whole, streamed)
    assert answer(list(text), functions or F, mode, reason)[0] == whole
    return whole["message"], whole["finish_reason"]


def events_of(*parts: str, mode: str = "disabled") -> list[list[Event]]:
    """What each part of an answer makes certain."""
    parser = M3Parser(F, mode, new_id=lambda: "c")
    return [parser.push(part) for part in parts]


@pytest.mark.parametrize(
    ("mode", "text", "reasoning", "content"),
    [
        ("adaptive", f"{THINK}why{UNTHINK}so", "why", "so"),
        ("adaptive", f"{UNTHINK}so", None, "so"),
        ("adaptive", "so", None, "so"),
        ("adaptive", f"{THINK}{UNTHINK}so", None, "so"),
        ("adaptive", f"{THINK}why", "why", None),
        ("adaptive", f"{THINK}why</mm:thi", "why</mm:thi", None),
        ("adaptive", "<mm:thi", None, "<mm:thi"),
        ("enabled", f"why{UNTHINK}so", "why", "so"),
        ("enabled", "why", "why", None),
        ("enabled", f"a{THINK}b{UNTHINK}so", f"a{THINK}b", "so"),
        ("disabled", f"so {UNTHINK} {THINK}", None, f"so {UNTHINK} {THINK}"),
        ("adaptive", f"{THINK}why\n{UNTHINK}\n\nso\n", "why\n", "\n\nso\n"),
        (
            "adaptive",
            f"{THINK}why{UNTHINK}so {THINK} and {UNTHINK}",
            "why",
            f"so {THINK} and {UNTHINK}",
        ),
        ("disabled", "", None, ""),
        ("disabled", " \n", None, " \n"),
    ],
)
def test_reasoning_stands_at_the_beginning_or_nowhere(
    mode: str, text: str, reasoning: str | None, content: str | None
) -> None:
    message, _ = read(text, mode)
    assert message.get("reasoning_content") == reasoning
    assert message["content"] == content


def test_a_call_inside_reasoning_is_reasoning() -> None:
    text = call({"s": "a"})
    message, reason = read(f"{text}{UNTHINK}so", "enabled")
    assert (message["reasoning_content"], message["content"], reason) == (text, "so", "stop")


def test_several_calls_in_blocks_and_around_text() -> None:
    both = block(invoke("f", {"s": "a"}), invoke("g", {}))
    message, reason = read(f"one \n{both}\n two{call({'n': 1})}\n", f=F["f"], g={})
    assert message["content"] == "one \n\n two"
    made = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    assert made == [("f", '{"s": "a"}'), ("g", "{}"), ("f", '{"n": 1}')]
    assert len({c["id"] for c in message["tool_calls"]}) == 3
    assert reason == "tool_calls"


def test_white_space_alone_around_calls_belongs_to_them() -> None:
    message, _ = read(f"\n\n{call({'s': 'a'})}\n{call({'s': 'b'})}\n")
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2


def test_white_space_between_elements_does_not_matter() -> None:
    spaced = "\n  " + element("s", "a") + "\n  " + element("n", 1) + "\n"
    message, _ = read(f'{NS}<tool_call>{NS}<invoke name="f">{spaced}{NS}</invoke>{NS}</tool_call>')
    assert message["tool_calls"][0]["function"]["arguments"] == '{"s": "a", "n": 1}'


MALFORMED = {
    "unknown function": call({}, "g"),
    "no call": block(),
    "text for arguments": call("abc"),
    "text between arguments": call(element("s", "a") + "and" + element("n", 1)),
    "text before a call": f"{NS}<tool_call>abc{block(invoke('f', {}))}",
    "argument given twice": call(element("s", "a") + element("n", 1) + element("s", "b")),
    "string given twice": call(element("s", "a") + element("s", "b")),
    "element inside a string": call({"s": {"a": 1}}),
    "element inside a number": call({"n": {"a": 1}}),
    "closed by another": call(f"{NS}<s>a{NS}</n>"),
    "closed twice": call(element("s", "a") + f"{NS}</s>"),
    "not closed": call(f"{NS}<s>a"),
    "tag without a name": call(f"{NS}<>a{NS}</>"),
    "namespace without a tag": call(f"a{NS} b"),
    "tag that never ends": call(f"{NS}<{'s' * 1100}"),
    "nested too deep": call(f"{NS}<x>" * 70 + f"{NS}</x>" * 70),
    "block that ends in a call": f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}</tool_call>',
    "block that does not end": call({"s": "a"})[:-60],
    "call without a name": call({}, ""),
    "name that never ends": f'{NS}<tool_call>\n{NS}<invoke name="{"f" * 70}',
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_call_is_text_to_its_last_character(text: str) -> None:
    message, reason = read(text)
    assert message == {"role": "assistant", "content": text, "refusal": None}
    assert reason == "stop"
    message, reason = read(f"before\n{text}", "adaptive")
    assert message["content"] == f"before\n{text}"


def test_white_space_around_a_malformed_call_is_text_as_well() -> None:
    message, _ = read(f"\n{call('stray')} \n")
    assert message["content"] == f"\n{call('stray')} \n"


def test_calls_before_a_malformed_one_are_kept_but_none_is_to_be_run() -> None:
    good, bad = invoke("f", {"s": "a"}), invoke("f", "stray")
    message, reason = read(block(good, bad, good) + "after")
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == ['{"s": "a"}']
    assert message["content"] == f"\n{bad}{good}{NS}</tool_call>after"
    assert reason == "stop"


def test_calls_are_parsed_again_after_a_malformed_block() -> None:
    message, reason = read(call("stray") + call({"s": "a"}))
    assert message["content"] == call("stray")
    assert len(message["tool_calls"]) == 1
    assert reason == "stop"


def test_without_functions_a_call_is_text() -> None:
    text = call({"s": "a"})
    whole, streamed = answer(list(text), {})
    assert whole["message"]["content"] == text
    assert same(whole, streamed)


def test_an_answer_cut_short_in_a_call_keeps_what_was_written_of_it() -> None:
    text = call({"s": "abcdef"}).partition("def")[0]
    whole, streamed = answer(list(text), F, finish_reason="length")
    for form in (whole, streamed):
        (made,) = form["message"]["tool_calls"]
        assert made["function"]["arguments"] == '{"s": "abc'
        assert form["finish_reason"] == "length"


@pytest.mark.parametrize(
    "cut", [f"{NS}<tool_call>\n{NS}<invoke na", f"{NS}<tool_call>", f"a{NS}<tool"]
)
def test_an_answer_cut_short_before_a_call_has_none(cut: str) -> None:
    message, reason = read(cut, reason="length")
    assert "tool_calls" not in message
    assert reason == "length"


def test_strings_are_streamed_as_the_model_writes_them() -> None:
    begun = f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}<s>'
    parts = events_of(begun, "Once ", 'upon "a" ', "time]<]mini")
    assert parts[1:] == [
        [CallArguments(0, '"Once ')],
        [CallArguments(0, 'upon \\"a\\" ')],
        [CallArguments(0, "time")],
    ]


def test_digits_are_streamed_once_they_are_too_many_for_a_number() -> None:
    schema = {"properties": {"v": {"type": ["string", "integer"]}}}
    parser = M3Parser({"f": schema}, "disabled")
    parser.push(f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}<v>')
    assert parser.push("1" * 400) == []
    assert parser.push("1") == [CallArguments(0, '"' + "1" * 401)]


def test_text_is_held_back_only_while_it_may_be_a_marker() -> None:
    assert events_of("a ", "b]", "c", "]<]minimax[>[<tool_", "x") == [
        [Content("a ")],
        [Content("b")],
        [Content("]c")],
        [],
        [Content("]<]minimax[>[<tool_x")],
    ]
    assert events_of("a <", "/mm:think", "!", mode="enabled") == [
        [Reasoning("a ")],
        [],
        [Reasoning("</mm:think!")],
    ]


def test_a_request_gets_the_parser_that_its_fields_ask_for() -> None:
    text = f"{THINK}a{UNTHINK}" + call({"s": "b"})
    tools = [{"type": "function", "function": {"name": "f"}}]
    results = {}
    for name, fields in {
        "calls": {"tools": tools},
        "no calls": {"tools": tools, "tool_choice": "none"},
        "raw": {"tools": tools, "skip_special_tokens": False},
    }.items():
        body = {"messages": [{"role": "user", "content": "a"}], **fields}
        parser = chat_parser(parse(ChatRequest, json.dumps(body).encode()))
        results[name] = [type(event).__name__ for event in parser.push(text)]
    assert results["calls"][:2] == ["Reasoning", "CallBegun"]
    assert results["no calls"] == ["Reasoning", "Content"]
    assert results["raw"] == ["Content"]


def test_ids_of_calls_look_like_openais_and_differ() -> None:
    assert new_call_id().startswith("call_")
    assert new_call_id() != new_call_id()
