"""What every generating request may say, and how a body becomes a request. Knows no endpoint.

A field that is not known is an error that names it. Fields that cannot change an answer are taken
and ignored; fields that would change it and are not served are taken only where they ask for
nothing.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, from_json
from typing_extensions import TypeAliasType

from winnow.config import Constraint, SamplingParams
from winnow.errors import RequestError

ItemT = TypeVar("ItemT")
ListOf = TypeAliasType("ListOf", Annotated[list[ItemT], FailFast()], type_params=(ItemT,))
"""A list whose first wrong entry ends the search: a body has room for millions of them."""

_UNION_BRANCH = re.compile(r"str|ListOf\[.*|list\[.*|<.*>")
"""What pydantic puts into the place of an error to say which branch of a union it tried."""

Whole = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""Any whole number that an engine may take: longer ones cannot even be written in an error."""

_UNKNOWN = "unknown"
_SHOWN_CHARACTERS = 80
_BIAS_SCHEMA = {
    "type": "object",
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}


class FieldError(RequestError):
    """A field of a request is wrong; `param` is its place in the body."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Part(BaseModel):
    """Base of everything in a body: unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: Any) -> Any:
        """One error for the first unknown field; left alone, pydantic makes one for each."""
        if isinstance(values, dict) and cls.model_config.get("extra") == "forbid":
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for name in values:
                if name not in known:
                    close = get_close_matches(name[:_SHOWN_CHARACTERS], known, n=1)
                    advice = f"did you mean {close[0]}?" if close else "remove it"
                    raise PydanticCustomError(
                        _UNKNOWN, "{advice}", {"name": name[:_SHOWN_CHARACTERS], "advice": advice}
                    )
        return values


class Body(Part):
    """Base of what a whole body is."""

    def check(self) -> None:
        """FieldError for what the types alone do not show."""


class ResponseSchema(Part):
    """`response_format.json_schema`. The schema is enforced with `strict` or without."""

    name: str = "response"
    description: str | None = None
    # Not named `schema`, which is a method of pydantic's models.
    body: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """`response_format`: text, any JSON object, or JSON of a schema."""

    type: str
    json_schema: ResponseSchema | None = None


class StreamOptions(Part):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool | None = None
    """Taken and ignored: no padding is sent."""
    continuous_usage_stats: bool | None = None
    """Taken and ignored: usage comes once, at the end."""


class Generation(Body):
    """The fields that chat and plain completions share."""

    model: str | None = None
    """None is the model that is served."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Whole | None = None
    stop: str | ListOf[str] | None = None
    logit_bias: Annotated[dict[str, Any], WithJsonSchema(_BIAS_SCHEMA)] | None = None
    response_format: ResponseFormat | None = None

    top_k: Whole | None = None
    """0 or -1 is all, and so for the other fields without a counterpart at OpenAI: None is off."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Whole | None = None
    stop_token_ids: ListOf[Whole] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    """Requests with different salts share no cached prefix."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    ASKS_NOTHING: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """For each field that is not served, the values that ask for nothing, beside null."""

    def check(self) -> None:
        """FieldError for what the types alone do not show."""
        for name, values in self.ASKS_NOTHING.items():
            value = getattr(self, name)
            if value is not None and not any(value == v and type(value) is type(v) for v in values):
                raise FieldError(name, f"{name} is {_shown(value)}, which is not served: remove it")
        if self.stream_options is not None and not self.stream:
            raise FieldError(
                "stream_options", "stream_options are given without stream: set stream to true"
            )
        if self.response_format is not None:
            _check_format(self.response_format)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    def token_limit(self) -> int | None:
        """The most tokens of an answer that the request asks for."""
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        """How many likely tokens to report at each place; None reports nothing."""
        raise NotImplementedError

    def shows_special_tokens(self) -> bool:
        """Whether the engine is to write out special tokens in the text."""
        return not self.skip_special_tokens


RequestT = TypeVar("RequestT", bound=Body)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """The request in a JSON body of UTF-8.

    RequestError for anything that is wrong with it, a FieldError where one field is to blame. NaN,
    infinities and halves of characters are no JSON.
    """
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError(f"the body is a JSON {_kind_of(values)}: send an object")
    try:
        request = kind.model_validate(values)
    except ValidationError as error:
        raise _field_error(error) from None
    request.check()
    return request


def to_sampling(
    request: Generation,
    *,
    prompt_tokens: int,
    max_model_len: int,
    default_max_tokens: int,
    constraint: Constraint | None = None,
    choice: int = 0,
) -> SamplingParams:
    """How the engine is to continue a prompt of `prompt_tokens` tokens.

    Without a limit of its own, a request gets as many tokens as `max_model_len` leaves, and no
    more than `default_max_tokens`. `choice` is the number of the answer among the `n` of a
    prompt: with a seed, each draws from its own. RequestError for values out of range.
    """
    room = max_model_len - prompt_tokens
    if room < 1:
        raise FieldError(
            "messages" if hasattr(request, "messages") else "prompt",
            f"the prompt has {prompt_tokens} tokens, the model takes {max_model_len} with its "
            f"answer: shorten the prompt by {1 - room} tokens at least",
        )
    limit = request.token_limit()
    options = {
        "max_tokens": min(room, default_max_tokens) if limit is None else limit,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": 0 if request.top_k == -1 else request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "min_tokens": request.min_tokens,
        "logit_bias": _bias(request.logit_bias),
        "stop": request.stop,
        "stop_ids": request.stop_token_ids,
        "seed": _seed(request.seed, choice),
        "logprobs": request.num_logprobs(),
        "constraint": constraint,
        "ignore_eos": request.ignore_eos,
        "skip_special_tokens": not request.shows_special_tokens(),
    }
    return SamplingParams.from_options(
        {name: value for name, value in options.items() if value is not None}
    )


def _seed(seed: int | None, choice: int) -> int | None:
    if seed is None or not -(2**63) <= seed < 2**63:
        return seed  # SamplingParams refuses what is out of range
    # Past the last seed comes the first, so that each choice of any seed has one.
    return (seed + choice + 2**63) % 2**64 - 2**63


def _bias(bias: dict[str, Any] | None) -> dict[int, float] | None:
    """JSON's keys are strings; the engine's are ids."""
    if bias is None:
        return None
    for key, value in bias.items():
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise FieldError(
                "logit_bias", f"logit_bias names token {_shown(key)}: its keys are token ids"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 100:
            raise FieldError(
                "logit_bias", f"logit_bias of token {key} is {_shown(value)}: give -100 to 100"
            )
    return {int(key): value for key, value in bias.items()}


def _check_format(wanted: ResponseFormat) -> None:
    if wanted.type not in ("text", "json_object", "json_schema"):
        raise FieldError(
            "response_format.type",
            f"response_format.type is {_shown(wanted.type)}: use text, json_object or json_schema",
        )
    if (wanted.json_schema is not None) != (wanted.type == "json_schema"):
        raise FieldError(
            "response_format.json_schema",
            f"response_format of type {wanted.type} "
            + ("lacks its json_schema" if wanted.json_schema is None else "takes no json_schema"),
        )
    if wanted.json_schema is not None and wanted.json_schema.body is None:
        raise FieldError(
            "response_format.json_schema.schema",
            "response_format.json_schema has no schema: give one, or use type json_object",
        )


def _field_error(error: ValidationError) -> FieldError:
    """The first fault in a sentence; of the branches of a union, the one that got furthest."""
    faults = error.errors(include_url=False)
    first = faults[0]["loc"][:1]
    fault = max((f for f in faults if f["loc"][:1] == first), key=lambda f: len(_place(f)))
    place = _place(fault)
    if fault["type"] == _UNKNOWN:
        param = _path([*place, fault["ctx"]["name"]])
        return FieldError(param, f"there is no field {param}: {fault['ctx']['advice']}")
    param = _path(place)
    if fault["type"] == "missing":
        return FieldError(param, f"{param} is missing: give it")
    message = fault["msg"][0].lower() + fault["msg"][1:]
    return FieldError(param, f"{param} is {_shown(fault['input'])}: {message}")


def _place(fault: ErrorDetails) -> list[str | int]:
    return [
        step for step in fault["loc"] if isinstance(step, int) or not _UNION_BRANCH.fullmatch(step)
    ]


def _path(place: list[str | int]) -> str:
    """messages[0].content, as the client wrote it."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return text.removeprefix(".")[:200]


def _shown(value: Any) -> str:
    """A value for an error message: no more of it than tells which."""
    text = repr(value) if isinstance(value, str | bool | float) else _big(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _big(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, int):
        # Python refuses to write out whole numbers of thousands of digits.
        return str(value) if value.bit_length() < 256 else f"a number of {value.bit_length()} bits"
    return f"a JSON {_kind_of(value)}"


def _kind_of(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
