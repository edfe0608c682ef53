"""Messages to a prompt's text, by the checkpoint's own chat template. Knows no tokens or HTTP.

A template comes from the checkpoint alone, never from a request, and runs in jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from winnow.errors import CheckpointError, RequestError

THINKING_MODES = ("adaptive", "enabled", "disabled")


class ChatTemplate:
    """Renders conversations. Thread-safe: rendering keeps no state."""

    def __init__(self, source: str, name: str) -> None:
        """`name` says in errors where the template is from; CheckpointError if it is none."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._name = name
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{name}, line {error.lineno}: {error.message}: copy the file again"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        thinking_mode: str = "adaptive",
        **kwargs: Any,
    ) -> str:
        """The prompt, up to where the model's answer begins.

        `messages` and `tools` as in OpenAI's protocol, but a call's arguments are an object.
        RequestError for what the template refuses or cannot render.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                thinking_mode=thinking_mode,
                add_generation_prompt=True,
                **kwargs,
            )
        except RequestError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"{self._name} cannot render these messages: {error}; send fields of the types "
                "that the chat API gives them"
            ) from error


def load_template(directory: Path) -> ChatTemplate | None:
    """The template of a checkpoint: `chat_template.jinja`, else that of `tokenizer_config.json`.

    None if it has neither. CheckpointError for files that cannot be read.
    """
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), str(path))
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8 ({error}): copy the file again") from error
    path = directory / "tokenizer_config.json"
    if not path.exists():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}): copy the file again") from error
    source = config.get("chat_template") if isinstance(config, Mapping) else None
    return ChatTemplate(source, str(path)) if isinstance(source, str) else None


def _to_json(value: Any, indent: int | None = None) -> str:
    """Plain JSON: jinja's own filter writes < and & for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise RequestError(message)
