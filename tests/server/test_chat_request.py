"""Conversations: which messages and tools are taken, and what the template gets of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from winnow.server.chat_request import ChatRequest
from winnow.server.protocol import FieldError, parse

USER = {"role": "user", "content": "hi"}
CONTENT = "messages[0].content[0]"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}


def chat(*messages: Any, **fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": messages or [USER], **fields}).encode())


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def part(kind: str = "text", **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def asking(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def calling(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}


def test_the_template_gets_text_in_one_piece_and_arguments_as_objects() -> None:
    request = chat(
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    )
    assert request.template_messages() == [
        {"role": "system", "content": "ab"},
        USER,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "why",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
            ],
        },
        {"role": "tool", "content": "done", "tool_call_id": "c"},
    ]


def test_a_message_that_the_server_sent_can_be_sent_back_as_it_came() -> None:
    sent = {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "r"}
    back = {**sent, "annotations": None, "audio": None, "function_call": None, "tool_calls": [CALL]}
    (message,) = chat(back).template_messages()
    assert message["reasoning_content"] == "r"


@pytest.mark.parametrize("arguments", ["", "  ", "{}"])
def test_a_call_without_arguments_may_say_so_in_any_way(arguments: str) -> None:
    (message,) = chat(calling(arguments)).template_messages()
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "custom", "custom": {"name": "f"}},
        {"type": "web_search", "search_context_size": "low"},
    ],
)
def test_a_tool_that_is_no_function_is_refused_for_its_type(tool: Any) -> None:
    with pytest.raises(FieldError, match="only tools of type function are served") as caught:
        chat(tools=[{"type": "function", "function": {"name": "f"}}, tool])
    assert caught.value.param == "tools[1].type"
    with pytest.raises(FieldError, match="only tools of type function are served") as caught:
        chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice=tool)
    assert caught.value.param == "tool_choice.type"


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "null", "[" * 5000, "9" * 5000])
def test_arguments_that_are_no_object_are_refused_by_place(arguments: str) -> None:
    with pytest.raises(FieldError, match=r"messages\[0\].tool_calls\[0\].function.arguments is no"):
        chat(calling(arguments)).template_messages()


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        (asking(part("image_url", image_url={"url": "file:///etc/passwd"})), CONTENT),
        (asking(part("input_audio", input_audio={})), CONTENT),
        (asking(part(text="a", x=1)), f"{CONTENT}.x"),
        (asking(part()), f"{CONTENT}.text"),
        (asking("a"), CONTENT),
    ],
)
def test_a_message_that_is_not_served_is_refused_by_place(message: Any, param: str) -> None:
    with pytest.raises(FieldError) as caught:
        chat(message)
    assert caught.value.param == param


def test_a_field_that_a_part_has_too_many_is_named_and_not_its_type() -> None:
    with pytest.raises(FieldError, match=r"no field messages\[0\].*cache_control: remove it"):
        chat(asking(part(text="a", cache_control={"type": "ephemeral"})))
    with pytest.raises(FieldError, match="is of type 'image_url': only parts"):
        chat(asking(part("image_url", image_url={})))


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, "adaptive"),
        ({"chat_template_kwargs": {"thinking_mode": "enabled"}}, "enabled"),
        ({"chat_template_kwargs": {}}, "adaptive"),
        ({"reasoning_effort": "none"}, "disabled"),
        ({"reasoning_effort": "minimal"}, "enabled"),
        ({"reasoning_effort": "high"}, "enabled"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking_mode": "enabled"}},
            "enabled",
        ),
    ],
)
def test_thinking_is_asked_for_by_mode_or_by_effort(fields: dict[str, Any], mode: str) -> None:
    assert chat(**fields).thinking_mode == mode


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"thinking_mode": "off"}}, "chat_template_kwargs.thinking_mode"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"thinking_mode": "enabled"}},
            "reasoning_effort",
        ),
    ],
)
def test_nothing_else_reaches_the_template(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_the_choice_says_which_functions_may_be_called_and_the_template_gets_all() -> None:
    tools = [tool("f", description="d", parameters={"type": "object"}), tool("g")]
    both = ["f", "g"]
    for choice, names in (("none", []), ("auto", both), ("required", both), (tool("g"), ["g"])):
        request = chat(tools=tools, tool_choice=choice)
        assert [function.name for function in request.functions_to_call] == names
        assert request.template_tools() == tools
    assert [function.name for function in chat(tools=tools).functions_to_call] == ["f", "g"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool('f">')]}, "tools[0].function.name"),
        ({"tools": [tool("f" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        (
            {"tools": [tool("f")], "tool_choice": tool("g")},
            "tool_choice",
        ),
        ({"tools": [tool("f")], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ],
)
def test_tools_that_cannot_be_called_are_refused_by_place(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(FieldError) as caught:
        chat(**fields)
    assert caught.value.param.startswith(param)


def calls(*ids: str | None) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{**CALL, "id": call} for call in ids]}


def results(*ids: str | None) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call, "content": f"of {call}"} for call in ids]


def said(request: ChatRequest) -> list[str]:
    return [m["content"] for m in request.template_messages() if m["role"] == "tool"]


def test_results_stand_in_the_order_of_their_calls() -> None:
    first = [calls("a", "b", "c"), *results("c", "a", "b"), {"role": "assistant", "content": "so"}]
    second = [calls("b", "a"), *results("b"), USER, *results("a")]
    assert said(chat(USER, *first)) == ["of a", "of b", "of c"]
    assert said(chat(USER, *first, *second)) == ["of a", "of b", "of c", "of b", "of a"]
    assert [m["role"] for m in chat(USER, *second).template_messages()] == [
        "user", "assistant", "tool", "user", "tool",
    ]  # fmt: skip


def test_results_and_calls_without_ids_stay_as_they_came() -> None:
    plain = [{"role": "tool", "content": text} for text in ("of 2", "of 1")]
    assert said(chat(calls(None, None), *plain)) == ["of 2", "of 1"]
    assert said(chat(calls("a", "b"), *plain)) == ["of 2", "of 1"]


@pytest.mark.parametrize(
    ("messages", "place", "says"),
    [
        ([calls("a", "b"), *results("a", "x")], 2, "is 'x', the calls before it are 'a', 'b': "),
        ([calls(*map(str, range(10))), *results("x")], 1, "'6', '7' and 2 more: give one of"),
        ([calls("a"), *results("a"), calls("b"), *results("a")], 3, "before it are 'b': give"),
        ([calls("a", "b"), *results("b", None)], 2, "is missing, the results beside it have one"),
        ([calls("a", "b"), *results("b")], 1, "is 'b', and that call comes after 'a', which has"),
        ([calls("a", "b"), *results("b", "a", "b")], 3, "is 'b', and that call has a result alr"),
        ([calls("a", "b"), *results("a"), USER, *results("a")], 3, "has a result already: remove"),
        ([calls(None), *results("a")], 1, "is 'a', but the calls have no id: give each its own"),
        ([USER, *results("a")], 1, "is 'a', but the calls are not there: send their message too"),
        ([calls("a"), *results("x" * 999)], 1, "xxx..., the calls before it are 'a': give one"),
    ],
)
def test_a_result_that_is_of_no_call_is_refused_by_place(
    messages: list[Any], place: int, says: str
) -> None:
    with pytest.raises(FieldError) as caught:
        chat(*messages)
    assert caught.value.param == f"messages[{place}].tool_call_id"
    assert says in str(caught.value)


def test_logprobs_are_asked_for_in_chat_by_two_fields() -> None:
    assert chat().num_logprobs() is None
    assert chat(logprobs=True).num_logprobs() == 0
    assert chat(logprobs=True, top_logprobs=4).num_logprobs() == 4
    with pytest.raises(FieldError, match="top_logprobs needs logprobs"):
        chat(top_logprobs=4)
