"""A plain completion in OpenAI's words, streamed or whole. Knows no chat and no HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from winnow.engine.output import Output, Usage
from winnow.server.token_logprobs import CompletionLogprobs


class CompletionChoice:
    """One of the answers to a completion request while it comes."""

    def __init__(self, index: int, logprobs: CompletionLogprobs | None = None) -> None:
        """`logprobs` writes those of the tokens; None if the request wants none."""
        self.index = index
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self._logprobs = logprobs
        self._text: list[str] = []
        self._pieces: list[dict[str, Any]] = []
        self._unsent = 0
        """Where the pieces of logprobs begin that no chunk has carried yet."""

    def push(self, output: Output) -> str:
        """Take what the engine says next; its text. Raises the output's error, if it has one."""
        if output.error is not None:
            raise output.error
        text = output.text or ""
        self._text.append(text)
        if self._logprobs is not None and output.token_ids:
            self._pieces.append(self._logprobs.piece([output]))
        if output.finish_reason is not None:
            self.finish_reason, self.usage = output.finish_reason, output.usage
        return text

    def choice(self) -> dict[str, Any]:
        """The entry of `choices` in a response that is not streamed."""
        return {
            "index": self.index,
            "text": "".join(self._text),
            "logprobs": None if self._logprobs is None else _joined(self._pieces),
            "finish_reason": self.finish_reason,
        }

    def unsent_logprobs(self) -> str:
        """Logprobs of the tokens since the last call of this, as JSON."""
        if self._logprobs is None or self._unsent == len(self._pieces):
            return "null"
        pieces, self._unsent = self._pieces[self._unsent :], len(self._pieces)
        return _dumps(_joined(pieces))


class CompletionChunks:
    """The chunks of one streamed response, each the UTF-8 of a JSON object."""

    def __init__(
        self, response_id: str, model: str, created: int, *, include_usage: bool = False
    ) -> None:
        values = {"id": response_id, "object": "text_completion", "created": created}
        head = _dumps({**values, "model": model}).removesuffix("}")
        self._before_index = head + ',"choices":[{"index":'
        self._after = '}],"usage":null}' if include_usage else "}]}"
        self._usage = head + ',"choices":[],"usage":'

    def of(self, choice: CompletionChoice, text: str) -> list[bytes]:
        """The chunk of what `choice.push` gave; none for a token whose text is held back."""
        if not text and choice.finish_reason is None:
            return []
        reason = "null" if choice.finish_reason is None else f'"{choice.finish_reason}"'
        chunk = (
            f'{self._before_index}{choice.index},"text":{_dumps(text)},'
            f'"logprobs":{choice.unsent_logprobs()},"finish_reason":{reason}{self._after}'
        )
        return [chunk.encode()]

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk after the last choice, for `stream_options.include_usage`."""
        return f"{self._usage}{_dumps(usage)}}}".encode()


def completion_response(
    response_id: str,
    model: str,
    created: int,
    choices: Sequence[CompletionChoice],
    usage: dict[str, Any],
) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    return {
        "id": response_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [choice.choice() for choice in choices],
        "usage": usage,
    }


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _dumps(value: object) -> str:
    return _ENCODER.encode(value)


def _joined(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {key: [entry for piece in pieces for entry in piece[key]] for key in keys}
