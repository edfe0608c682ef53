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

from winnow.errors import RequestError

ItemT = TypeVar("ItemT")
ListOf = TypeAliasType("ListOf", Annotated[list[ItemT], FailFast()], type_params=(ItemT,))
"""A list whose first wrong entry ends the search: a body has room for millions of them."""

_UNION_BRANCH = re.compile(r"str|ListOf\[.*|list\[.*|<.*>")
"""What pydantic puts into the place of an error to say which branch of a union it tried."""

Whole = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""Any whole number that an engine may take: longer ones cannot even be written in an error."""

_WANTED = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "an object"),
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing_size"), "a whole number"),
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "an array",
    "string_type": "a string",
}
"""For pydantic's kind of error, what the field takes."""

_UNKNOWN = "unknown"
_OTHER_TYPE = "other_type"
_SHOWN_CHARACTERS = 80
_BIAS_SCHEMA = {
    "type": "object",
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}


class FieldError(RequestError):
    """A field of a request is wrong: `param` is its place in the body, `code` what programs see."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


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


class FunctionPart(Part):
    """Base of what is served of type function alone; what other types have is not looked at."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, values: Any) -> Any:
        kind = values.get("type") if isinstance(values, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise PydanticCustomError(_OTHER_TYPE, "{type}", {"type": shown(kind)})
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

    include_usage: bool | None = False
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
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
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
                raise FieldError(name, f"{name} is {shown(value)}, which is not served: remove it")
        if self.stream_options is not None and not self.stream:
            raise FieldError(
                "stream_options", "stream_options are given without stream: set stream to true"
            )
        if self.response_format is not None:
            _check_format(self.response_format)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    def token_limit(self) -> tuple[str, int | None]:
        """The most tokens of an answer that the request asks for, and the field that says so."""
        return "max_tokens", self.max_tokens

    def num_logprobs(self) -> int | None:
        """How many likely tokens to report at each place; None reports nothing."""
        raise NotImplementedError

    NUM_LOGPROBS: ClassVar[str] = "logprobs"
    """The field that says how many."""

    def shows_special_tokens(self) -> bool:
        """Whether the engine is to write out special tokens in the text."""
        return self.skip_special_tokens is False


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


def _check_format(wanted: ResponseFormat) -> None:
    if wanted.type not in ("text", "json_object", "json_schema"):
        raise FieldError(
            "response_format.type",
            f"response_format.type is {shown(wanted.type)}: use text, json_object or json_schema",
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
    if fault["type"] == _OTHER_TYPE:
        param = _path([*place, "type"])
        return FieldError(
            param,
            f"{param} is {fault['ctx']['type']}: only tools of type function are served, so give a "
            "function or remove it",
        )
    param = _path(place)
    if fault["type"] == "missing":
        return FieldError(param, f"{param} is missing: give it")
    # Branches of a union that came as far each say what they would have taken.
    advice = dict.fromkeys(
        _advice(f) for f in faults if f["loc"][:1] == first and _place(f) == place
    )
    return FieldError(
        param,
        f"{param} is {shown(fault['input'])}: {' or '.join(advice).replace(' or give ', ' or ')}",
    )


def _advice(fault: ErrorDetails) -> str:
    """What to do about a fault, in our words: pydantic's are about Python."""
    kind, context = fault["type"], fault.get("ctx", {})
    if kind in _WANTED:
        return f"give {_WANTED[kind]}"
    match kind:
        case "greater_than_equal":
            return f"give at least {context['ge']}"
        case "less_than_equal":
            return f"give at most {context['le']}"
        case "too_short":
            return f"give at least {context['min_length']}, it holds {context['actual_length']}"
        case "too_long":
            return f"give at most {context['max_length']}"
        case "literal_error":
            return f"use {context['expected']}"
        case "none_required":
            return "it is served only as null, so remove it"
    return fault["msg"][0].lower() + fault["msg"][1:]


def _place(fault: ErrorDetails) -> list[str | int]:
    return [
        step for step in fault["loc"] if isinstance(step, int) or not _UNION_BRANCH.fullmatch(step)
    ]


def _path(place: list[str | int]) -> str:
    """messages[0].content, as the client wrote it."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return text.removeprefix(".")[:200]


def shown(value: Any) -> str:
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
