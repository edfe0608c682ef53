"""A chat answer in OpenAI's words, streamed or whole, from the events of one parser.

Both forms come from the same events, so they say the same. Knows no model's format and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from winnow.engine.output import Output, Usage
from winnow.server.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    CallRejected,
    Content,
    Event,
    Reasoning,
)
from winnow.server.token_logprobs import ChatLogprobs


class Parser(Protocol):
    """Turns a model's text into events; `winnow.server.m3_parser` has the family's."""

    def push(self, text: str) -> list[Event]:
        """What is certain after this text."""
        ...

    def finish(self, *, truncated: bool) -> list[Event]:
        """The rest, at the answer's end; `truncated` if the model had more to say."""
        ...


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    whole: bool = False


class ChatChoice:
    """One of the answers to a chat request while it comes: what it says so far, and how it ends."""

    def __init__(self, index: int, parser: Parser, logprobs: ChatLogprobs | None = None) -> None:
        """`logprobs` writes those of the tokens; None if the request wants none."""
        self.index = index
        self.finish_reason: str | None = None
        """OpenAI's word, once the answer has ended."""
        self.usage: Usage | None = None
        self._parser = parser
        self._logprobs = logprobs
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._rejected = False
        self._entries: list[dict[str, Any]] = []
        self._unsent = 0
        """Where the entries of logprobs begin that no chunk has carried yet."""

    def push(self, output: Output) -> list[Event]:
        """Take what the engine says next; the events that follow from it.

        Raises the output's error, if it has one.
        """
        if output.error is not None:
            raise output.error
        events = self._parser.push(output.text) if output.text else []
        if output.finish_reason is not None:
            events += self._parser.finish(truncated=output.finish_reason != "stop")
            self.usage = output.usage
        if self._logprobs is not None:
            self._entries += self._logprobs.entries(output)
        for event in events:
            self._fold(event)
        if output.finish_reason is not None:
            self.finish_reason = self._reason(output.finish_reason)
        return events

    def _fold(self, event: Event) -> None:
        match event:
            case Content(text):
                self._content.append(text)
            case Reasoning(text):
                self._reasoning.append(text)
            case CallBegun(index, call_id, name):
                self._calls[index] = _Call(call_id, name)
            case CallArguments(index, piece):
                self._calls[index].arguments.append(piece)
            case CallEnded(index):
                self._calls[index].whole = True
            case CallRejected(index, text):
                self._rejected = True
                if index is not None:
                    del self._calls[index]
                self._content.append(text)

    def _reason(self, engine_reason: str) -> str:
        """A rejected call makes it stop: its pieces may have been streamed, and must not be run."""
        if engine_reason == "stop" and self._calls and not self._rejected:
            return "tool_calls"
        return engine_reason

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    def message(self) -> dict[str, Any]:
        """The assistant's message so far. A call that was cut short has part of its arguments."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not (self._calls or self._reasoning) else None,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = self.reasoning
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in self._calls.values()
            ]
        return message

    def choice(self) -> dict[str, Any]:
        """The entry of `choices` in a response that is not streamed."""
        return {
            "index": self.index,
            "message": self.message(),
            "logprobs": None if self._logprobs is None else _wrapped(self._entries),
            "finish_reason": self.finish_reason,
        }

    def unsent_logprobs(self) -> str:
        """Logprobs of the tokens since the last call of this, as JSON."""
        if self._logprobs is None or self._unsent == len(self._entries):
            return "null"
        entries, self._unsent = self._entries[self._unsent :], len(self._entries)
        return _dumps(_wrapped(entries))


class ChatChunks:
    """The chunks of one streamed response, each the UTF-8 of a JSON object."""

    def __init__(
        self, response_id: str, model: str, created: int, *, include_usage: bool = False
    ) -> None:
        head = _head(response_id, "chat.completion.chunk", model, created)
        self._before_index = head + ',"choices":[{"index":'
        self._after = '}],"usage":null}' if include_usage else "}]}"
        self._usage = head + ',"choices":[],"usage":'

    def role(self, index: int) -> bytes:
        """The first chunk of a choice."""
        return self._chunk(index, '{"role":"assistant","content":""}', "null")

    def of(self, choice: ChatChoice, events: Iterable[Event]) -> list[bytes]:
        """Chunks of what `choice.push` gave, the last one with its finish reason if it has ended.

        Logprobs of tokens whose text is held back come with the next chunk.
        """
        index = choice.index
        chunks = [
            self._chunk(index, delta, choice.unsent_logprobs())
            for delta in map(_delta, events)
            if delta is not None
        ]
        if choice.finish_reason is not None:
            reason = f'"{choice.finish_reason}"'
            chunks.append(self._chunk(index, "{}", choice.unsent_logprobs(), reason))
        return chunks

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk after the last choice, for `stream_options.include_usage`."""
        return f"{self._usage}{_dumps(usage)}}}".encode()

    def _chunk(self, index: int, delta: str, logprobs: str, reason: str = "null") -> bytes:
        return (
            f'{self._before_index}{index},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{reason}{self._after}'
        ).encode()


def chat_response(
    response_id: str,
    model: str,
    created: int,
    choices: Sequence[ChatChoice],
    usage: dict[str, Any],
) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice.choice() for choice in choices],
        "usage": usage,
    }


def usage_of(usages: Sequence[Usage], reasoning_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's counts of a response with `usages` of its choices, all to one prompt.

    The prompt is counted once. Cached tokens are those of the choice that found most; reasoning
    tokens are left out where nobody counted them.
    """
    return counts(usages[0].prompt_tokens, usages, reasoning_tokens)


def counts(
    prompt_tokens: int, usages: Sequence[Usage], reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """OpenAI's counts where several prompts have `prompt_tokens` together."""
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    values: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": max(usage.cached_tokens for usage in usages)},
    }
    if reasoning_tokens is not None:
        values["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return values


def _delta(event: Event) -> str | None:
    """The delta of an event as JSON; None for an event that clients see by others."""
    match event:
        case Content(text) | CallRejected(_, text):
            return f'{{"content":{_dumps(text)}}}'
        case Reasoning(text):
            return f'{{"reasoning_content":{_dumps(text)}}}'
        case CallArguments(index, piece):
            return (
                f'{{"tool_calls":[{{"index":{index},"function":{{"arguments":{_dumps(piece)}}}}}]}}'
            )
        case CallBegun(index, call_id, name):
            call = {
                "index": index,
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            return _dumps({"tool_calls": [call]})
        case CallEnded():
            return None


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _dumps(value: object) -> str:
    return _ENCODER.encode(value)


def _wrapped(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}


def _head(response_id: str, kind: str, model: str, created: int) -> str:
    values = {"id": response_id, "object": kind, "created": created, "model": model}
    return _dumps(values).removesuffix("}")
