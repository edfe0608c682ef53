"""The body of /v1/chat/completions: messages, tools, and what they mean together.

Knows the fields, not the format in which a model reads or writes them.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from winnow.server.protocol import FieldError, FunctionPart, Generation, ListOf, Part, Whole
from winnow.server.template import THINKING_MODES
from winnow.server.tool_results import in_call_order

MAX_TOOLS = 128
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_THINKING_OF_EFFORT = {
    "none": "disabled",
    **dict.fromkeys(("minimal", "low", "medium", "high", "xhigh", "max"), "enabled"),
}


class ContentPart(Part):
    """A part of a message. Only text is served; other types are named in the error."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    text: str | None = None

    def check(self, place: str) -> None:
        """FieldError for a part of another type, without text, or with more than that."""
        if self.type not in ("text", "refusal"):
            raise FieldError(
                place,
                f"{place} is of type {self.type[:40]!r}: only parts "
                '{"type": "text", "text": ...} are served',
            )
        if self.model_extra:
            param = f"{place}.{next(iter(self.model_extra))[:80]}"
            raise FieldError(param, f"there is no field {param}: remove it")
        if self.text is None:
            raise FieldError(f"{place}.text", f"{place}.text is missing: give it")


class CalledFunction(Part):
    """The function of an earlier call; its arguments are JSON, as they came."""

    name: str
    arguments: str = "{}"


class EarlierCall(Part):
    """A call that the model made in an earlier turn. Fields of streamed calls are ignored."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


def _text_or_parts(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[ListOf[ContentPart], Tag("<parts>")],
    Discriminator(_text_or_parts),
]


class Message(Part):
    """One turn, of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    """Taken and ignored: the family's format has no place for it."""
    tool_calls: ListOf[EarlierCall] | None = None
    tool_call_id: str | None = None
    """Says whose result this is; in the prompt, results stand in the order of the calls."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name for `reasoning_content`."""
    refusal: None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None

    def check(self, place: str) -> None:
        """FieldError for what this message lacks or cannot hold."""
        if self.tool_calls and self.role != "assistant":
            raise FieldError(
                f"{place}.tool_calls", f"{place} calls tools, but its role is {self.role}"
            )
        if self.content is None and not (self.role == "assistant" and self._says_something()):
            raise FieldError(f"{place}.content", f"{place}.content is missing: give text")
        for i, part in enumerate(self.content if isinstance(self.content, list) else []):
            part.check(f"{place}.content[{i}]")

    def _says_something(self) -> bool:
        return bool(self.tool_calls or self.reasoning_content or self.reasoning)

    def for_template(self, place: str) -> dict[str, Any]:
        """The message as a chat template reads it: text in one piece, arguments as objects."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text or "" for part in content)
        message: dict[str, Any] = {"role": self.role, "content": content or ""}
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call, f"{place}.tool_calls[{i}]"),
                    },
                }
                for i, call in enumerate(self.tool_calls)
            ]
        return message


class Function(Part):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments; none means that it takes none."""
    strict: bool | None = None
    """Arguments are decoded under their schema with it or without."""


class Tool(FunctionPart):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function


class NamedFunction(Part):
    name: str


class NamedChoice(FunctionPart):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    function: NamedFunction


def _word_or_name(value: Any) -> str:
    return "<name>" if isinstance(value, dict | NamedChoice) else "<word>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedChoice, Tag("<name>")],
    Discriminator(_word_or_name),
]


class TemplateOptions(Part):
    """`chat_template_kwargs`: what a request may say to the template."""

    thinking_mode: Literal["adaptive", "enabled", "disabled"] | None = None


class ChatRequest(Generation):
    """A conversation to be continued by one message, or by `n`."""

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Whole | None = None
    tools: Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    """Another way to say `thinking_mode`: none is disabled, every other word is enabled."""
    chat_template_kwargs: TemplateOptions | None = None

    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    verbosity: Any = None
    moderation: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    documents: Any = None
    ASKS_NOTHING: ClassVar[dict[str, tuple[Any, ...]]] = {
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "functions": ([],),
        "function_call": ("none",),
        "verbosity": ("medium",),
        "moderation": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template": (),
        "documents": ([],),
    }

    def check(self) -> None:
        """FieldError for what the types alone do not show."""
        super().check()
        for i, message in enumerate(self.messages):
            message.check(f"messages[{i}]")
        in_call_order(self.messages)
        self._check_tools()
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs: set logprobs to true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise FieldError(
                "max_completion_tokens",
                f"max_tokens is {self.max_tokens}, max_completion_tokens is "
                f"{self.max_completion_tokens}: both mean the same, so give only one",
            )
        asked = self.chat_template_kwargs and self.chat_template_kwargs.thinking_mode
        effort = self.reasoning_effort
        if asked and effort and asked != _THINKING_OF_EFFORT[effort]:
            raise FieldError(
                "reasoning_effort",
                f"reasoning_effort {effort} means thinking_mode {_THINKING_OF_EFFORT[effort]}, "
                f"and chat_template_kwargs.thinking_mode is {asked}: give only one",
            )

    def _check_tools(self) -> None:
        names = set()
        for i, tool in enumerate(self.tools or []):
            name = tool.function.name
            param = f"tools[{i}].function.name"
            if not _TOOL_NAME.fullmatch(name):
                raise FieldError(
                    param,
                    f"{param} is {name[:80]!r}: use 1 to 64 letters, digits, _ and -",
                )
            if name in names:
                raise FieldError(param, f"{param} is {name!r}, as another tool: rename one")
            names.add(name)
        choice = self.tool_choice
        if isinstance(choice, NamedChoice) and choice.function.name not in names:
            raise FieldError(
                "tool_choice",
                f"tool_choice names {choice.function.name[:80]!r}, which is not among the "
                f"{len(names)} tools: give its definition in tools",
            )
        if choice == "required" and not names:
            raise FieldError("tool_choice", "tool_choice is required without tools: give tools")

    @property
    def thinking_mode(self) -> str:
        """One of `THINKING_MODES`."""
        if self.chat_template_kwargs is not None and self.chat_template_kwargs.thinking_mode:
            return self.chat_template_kwargs.thinking_mode
        if self.reasoning_effort is not None:
            return _THINKING_OF_EFFORT[self.reasoning_effort]
        return THINKING_MODES[0]

    @property
    def functions_to_call(self) -> list[Function]:
        """What the model may call in this answer: none with `tool_choice` none, else of `tools`."""
        if self.tool_choice == "none":
            return []
        functions = [tool.function for tool in self.tools or []]
        if isinstance(self.tool_choice, NamedChoice):
            return [f for f in functions if f.name == self.tool_choice.function.name]
        return functions

    def template_messages(self) -> list[dict[str, Any]]:
        """Messages as `ChatTemplate.render` takes them, results in the order of their calls."""
        return [
            self.messages[i].for_template(f"messages[{i}]") for i in in_call_order(self.messages)
        ]

    def template_tools(self) -> list[dict[str, Any]]:
        """Tools as `ChatTemplate.render` takes them: all that the request gives, as it gives them.

        They do not depend on `tool_choice`, so that turns of one conversation share a prefix.
        """
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []]

    def token_limit(self) -> tuple[str, int | None]:
        """The most tokens of an answer that the request asks for, and the field that says so."""
        if self.max_completion_tokens is None:
            return super().token_limit()
        return "max_completion_tokens", self.max_completion_tokens

    NUM_LOGPROBS = "top_logprobs"

    def num_logprobs(self) -> int | None:
        """How many likely tokens to report at each place; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def shows_special_tokens(self) -> bool:
        """Always: what opens reasoning and calls may be special tokens, and the parser reads it."""
        return True


def _arguments(call: EarlierCall, place: str) -> dict[str, Any]:
    """The arguments of an earlier call as an object; an empty text is one without any."""
    text = call.function.arguments
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise FieldError(
            f"{place}.function.arguments",
            f"{place}.function.arguments is no JSON object: send the arguments as they came, or "
            "leave the call out if its answer was cut short",
        )
    return arguments
