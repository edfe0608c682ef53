"""Writing the family's answers as the chat template writes them, and reading streamed chunks as
clients do. Shares nothing with the code under test.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

from winnow.engine.output import Output, Usage
from winnow.server.answers import ChatChoice, ChatChunks
from winnow.server.m3_parser import M3Parser

NS = "]<]minimax[>["


def inside(value: Any) -> str:
    """A value as the inside of an element."""
    if isinstance(value, dict):
        return "".join(element(name, inner) for name, inner in value.items())
    if isinstance(value, list):
        return "".join(element("item", inner) for inner in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def element(name: str, value: Any) -> str:
    return f"{NS}<{name}>{inside(value)}{NS}</{name}>"


def invoke(name: str, arguments: Any) -> str:
    """A call; arguments that are a text stand in it as they are."""
    return f'{NS}<invoke name="{name}">{inside(arguments)}{NS}</invoke>\n'


def block(*invokes: str) -> str:
    return f"{NS}<tool_call>\n{''.join(invokes)}{NS}</tool_call>"


def call(arguments: Any, name: str = "f") -> str:
    return block(invoke(name, arguments))


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    """The text cut at these places."""
    places = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    return [text[i:j] for i, j in itertools.pairwise(places)]


def answer(
    parts: Iterable[str],
    functions: dict[str, Any] | None = None,
    thinking_mode: str = "disabled",
    finish_reason: str = "stop",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entry of `choices` that is not streamed, and what a client makes of the stream."""
    numbers = itertools.count()
    parser = M3Parser(functions or {}, thinking_mode, new_id=lambda: f"call_{next(numbers)}")
    choice, chunks = ChatChoice(0, parser), ChatChunks("chat-1", "m", 0)
    sent = [chunks.role(0)]
    for part in parts:
        sent += chunks.of(choice, choice.push(Output("r", text=part)))
    last = Output("r", text="", finish_reason=finish_reason, usage=Usage(1, 1, 0))
    sent += chunks.of(choice, choice.push(last))
    return choice.choice(), folded(sent)


def folded(sent: Iterable[bytes]) -> dict[str, Any]:
    """The one choice of some chunks, put together as OpenAI's client does it."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    reason = None
    for chunk in map(json.loads, sent):
        (choice,) = chunk["choices"]
        assert reason is None, "a chunk came after the last one"
        reason = choice["finish_reason"]
        for key, value in choice["delta"].items():
            if key == "tool_calls":
                for delta in value:
                    _add_call(calls, delta)
            else:
                message[key] = message.get(key, "") + value
    if calls:
        message["tool_calls"] = list(calls.values())
    return {"message": message, "finish_reason": reason}


def _add_call(calls: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
    if delta["index"] not in calls:
        calls[delta["index"]] = {
            "id": delta["id"],
            "type": delta["type"],
            "function": {"name": delta["function"]["name"], "arguments": ""},
        }
    calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]


def same(whole: dict[str, Any], streamed: dict[str, Any]) -> bool:
    """Whether both forms of an answer say the same.

    No content and empty content are the same; calls without whole arguments are no calls, since
    what was streamed of a call before it was rejected cannot be taken back.
    """
    one, other = _message(whole), _message(streamed)
    assert one.pop("refusal") is None
    return one == other and whole["finish_reason"] == streamed["finish_reason"]


def _message(choice: dict[str, Any]) -> dict[str, Any]:
    message = {"content": "", **choice["message"]}
    calls = [c for c in message.pop("tool_calls", []) if _is_json(c["function"]["arguments"])]
    return {**message, "content": message["content"] or "", "calls": calls}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
