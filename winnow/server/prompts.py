"""Requests to token ids. Slow for long prompts, and safe to call from any thread."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from winnow.errors import RequestError
from winnow.server.serving import Serving

log = logging.getLogger(__name__)


def render_chat(
    serving: Serving,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    thinking_mode: str,
) -> list[int]:
    """Token ids of a conversation, up to where the model's answer begins.

    RequestError for messages that the template refuses, and for a checkpoint without template.
    """
    if serving.template is None:
        raise RequestError(
            "this checkpoint has no chat template: use /v1/completions, or add "
            "chat_template.jinja to its directory"
        )
    tokenizer = serving.text()
    prompt = serving.template.render(messages, tools, thinking_mode)
    if serving.config.log_prompts:
        log.info("prompt %r", prompt)
    return tokenizer.encode(prompt, add_special=False)


def encode_prompt(serving: Serving, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a prompt of plain completion, which may be ids already."""
    if serving.config.log_prompts:
        log.info("prompt %r", prompt)
    if isinstance(prompt, str):
        return serving.text().encode(prompt)
    return list(prompt)
