"""Prompts of conversations, and templates that a checkpoint should not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.m3_text import answer

from winnow.errors import CheckpointError, RequestError
from winnow.server.template import ChatTemplate, load_template

USER = {"role": "user", "content": "hi"}
CALL = {"function": {"name": "f", "arguments": {"s": "x < y", "l": [1, None], "o": {"b": True}}}}
SCHEMA = {
    "properties": {
        "s": {"type": "string"},
        "l": {"type": "array", "items": {"type": ["integer", "null"]}},
        "o": {"properties": {"b": {"type": "boolean"}}},
    }
}


@pytest.fixture(scope="module")
def template(tiny: Path) -> ChatTemplate:
    found = load_template(tiny)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("mode", "end"), [("adaptive", ""), ("enabled", "<mm:think>"), ("disabled", "</mm:think>")]
)
def test_the_prompt_ends_where_the_answer_begins(
    template: ChatTemplate, mode: str, end: str
) -> None:
    assert template.render([USER], thinking_mode=mode) == f"]~!b[]~b]user\nhi[e~[\n]~b]ai\n{end}"


def test_tools_are_described_as_the_request_gives_them(template: ChatTemplate) -> None:
    function = {"name": "f", "description": "a < b & ü", "parameters": SCHEMA}
    prompt = template.render([USER], [{"type": "function", "function": function}])
    described = json.dumps(function, ensure_ascii=False)
    assert f"# Tools\n<tools>\n<tool>{described}</tool>\n</tools>[e~[\n" in prompt


def test_results_of_several_calls_stand_in_one_turn(template: ChatTemplate) -> None:
    results = [{"role": "tool", "content": text} for text in ("one", "two")]
    prompt = template.render([USER, *results])
    assert "]~b]tool\n<response>one</response>\n<response>two</response>[e~[\n]~b]ai" in prompt


def test_an_answer_sent_back_is_written_as_the_parser_reads_it(template: ChatTemplate) -> None:
    turn = {"role": "assistant", "content": "so ", "reasoning_content": "r\n", "tool_calls": [CALL]}
    prompt = template.render([USER, turn])
    written = prompt.split("]~b]ai\n")[1].removesuffix("[e~[\n")
    message = answer([written], {"f": SCHEMA}, "adaptive")[0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("so ", "r\n")
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == CALL["function"]["arguments"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "robot", "content": "a"},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": 5},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": object()}}]},
    ],
)
def test_what_cannot_be_rendered_is_the_requests_fault(
    template: ChatTemplate, message: Any
) -> None:
    with pytest.raises(RequestError):
        template.render([message])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_reaches_nothing_but_its_variables(source: str) -> None:
    with pytest.raises(RequestError, match=r"x\.jinja cannot render"):
        ChatTemplate(source, "x.jinja").render([USER])


def test_text_of_messages_is_never_a_template(template: ChatTemplate) -> None:
    assert "{{ 7 * 7 }}" in template.render([{"role": "user", "content": "{{ 7 * 7 }}"}])


def test_a_template_with_a_fault_is_named_with_its_line() -> None:
    with pytest.raises(CheckpointError, match=r"x\.jinja, line 2"):
        ChatTemplate("a\n{% if %}", "x.jinja")


def test_a_template_is_found_in_its_file_or_in_the_tokenizers(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": "from the config"}')
    found = load_template(tmp_path)
    assert found is not None
    assert found.render([]) == "from the config"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    found = load_template(tmp_path)
    assert found is not None
    assert found.render([]) == "from the file"
    config.write_text("{")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="not UTF-8"):
        load_template(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="not JSON"):
        load_template(tmp_path)
