"""Logprobs of tokens in OpenAI's words, of chat and of plain completions. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from winnow.engine.output import Output
from winnow.engine.text import Tokenizer

_REPLACEMENT = "\ufffd"
_LOWEST = -9999.0
"""What OpenAI's API says for a token of no probability: JSON has no infinity."""


class ChatLogprobs:
    """Entries of `logprobs.content`: every token of the answer, also those of reasoning and tags.

    `top_logprobs` holds as many of the likeliest tokens as the request asked for.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def entries(self, output: Output) -> list[dict[str, Any]]:
        """One entry for each token of an output."""
        return [
            {
                **self._token(token_id, logprobs.chosen),
                "top_logprobs": [self._token(other, value) for other, value in logprobs.top],
            }
            for token_id, logprobs in zip(output.token_ids, output.logprobs, strict=True)
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelt = self._tokenizer.token_bytes(token_id)
        return {
            "token": spelt.decode(errors="replace"),
            "logprob": max(logprob, _LOWEST),
            "bytes": list(spelt),
        }


class CompletionLogprobs:
    """The `logprobs` object of a plain completion; `text_offset` counts characters of its tokens.

    `top_logprobs` has the chosen token too, where it is none of the likeliest. Where no tokenizer
    is, a token is called by its id.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def piece(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The object for the tokens of some outputs, which follow those given before."""
        tokens: list[str] = []
        chosen: list[float] = []
        top: list[dict[str, float]] = []
        offsets: list[int] = []
        for output in outputs:
            for token_id, logprobs in zip(output.token_ids, output.logprobs, strict=True):
                tokens.append(self._name(token_id))
                chosen.append(max(logprobs.chosen, _LOWEST))
                top.append(self._top((*logprobs.top, (token_id, logprobs.chosen))))
                offsets.append(self._offset)
                self._offset += self._characters(token_id)
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _top(self, likely: Sequence[tuple[int, float]]) -> dict[str, float]:
        """By name; of tokens with the same name the likelier, which comes first, is kept."""
        named: dict[str, float] = {}
        for token_id, logprob in likely:
            named.setdefault(self._name(token_id), max(logprob, _LOWEST))
        return named

    def _name(self, token_id: int) -> str:
        """A token's text; its bytes in hexadecimal where they are no whole characters."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        spelt = self._tokenizer.token_bytes(token_id)
        text = spelt.decode(errors="replace")
        return "bytes:" + "".join(f"\\x{b:02x}" for b in spelt) if _REPLACEMENT in text else text

    def _characters(self, token_id: int) -> int:
        """Characters that a token begins: its bytes that continue none."""
        if self._tokenizer is None:
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self._tokenizer.token_bytes(token_id))
