"""The body of /v1/completions. Knows nothing of chat."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from winnow.server.protocol import FieldError, Generation, Whole

_MAX_ID = 2**31 - 1
_TOKEN = {"type": "integer", "minimum": 0, "maximum": _MAX_ID}
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": _TOKEN, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}


class CompletionRequest(Generation):
    """A prompt to be continued, or several."""

    # A union of lists would collect an error for each of a million ids: `check` looks instead.
    prompt: Annotated[str | list[Any], WithJsonSchema(_PROMPT_SCHEMA)]
    """Text or token ids, one prompt or several."""
    logprobs: Whole | None = None

    echo: Any = None
    suffix: Any = None
    best_of: Any = None
    ASKS_NOTHING: ClassVar[dict[str, tuple[Any, ...]]] = {
        "echo": (False,),
        "suffix": ("",),
        "best_of": (1,),
    }

    def check(self) -> None:
        """FieldError for what the types alone do not show."""
        if self.best_of is not None and self.best_of == self.num_choices:
            self.best_of = None
        super().check()
        for prompt in self.prompts():
            if not prompt:
                raise FieldError("prompt", "prompt is empty: give text or token ids")
            if isinstance(prompt, str):
                continue
            if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
                raise FieldError("prompt", "prompt mixes kinds: give texts or token ids")
            if min(prompt) < 0 or max(prompt) > _MAX_ID:
                raise FieldError("prompt", f"prompt holds an id that is not in 0 to {_MAX_ID}")

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as ids."""
        if isinstance(self.prompt, str) or not any(isinstance(p, str | list) for p in self.prompt):
            return [self.prompt]
        return self.prompt

    def num_logprobs(self) -> int | None:
        """How many likely tokens to report at each place; None reports nothing."""
        return self.logprobs
