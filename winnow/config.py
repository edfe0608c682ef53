"""What a user may ask of a request and of the engine, checked. Knows no model, tensor or machine.

Both classes are frozen, copy what they are given, and refuse options that they do not know.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Self

from winnow.errors import RequestError, UnsupportedError, WinnowError
from winnow.spec.formats import CACHE_FORMATS

DTYPES = ("float32", "bfloat16")
CONSTRAINT_KINDS = ("json_object", "json_schema", "regex", "structural_tag")
MAX_STOPS = 64
MAX_LOGPROBS = 20
_MAX_ID = 2**31 - 1
_MAX_FLOAT = sys.float_info.max


@dataclass(frozen=True)
class _Range:
    """The numbers that an option takes, both ends included, and a word on what they do."""

    low: float
    high: float
    hint: str
    whole: bool = True
    optional: bool = False

    def check(self, name: str, value: object, error: type[WinnowError]) -> Any:
        """The value: an int where the option is whole, else a float; None where that is allowed."""
        if value is None and self.optional:
            return None
        kinds = int if self.whole else (int, float)
        if isinstance(value, kinds) and not isinstance(value, bool) and self._holds(value):
            return value if self.whole else float(value)
        raise error(f"{name} is {value!r}; it takes {self}: {self.hint}")

    def _holds(self, value: int | float) -> bool:
        # A NaN compares false with both ends; a whole number may be past the largest float.
        return self.low <= value <= (self.high if self.whole else min(self.high, _MAX_FLOAT))

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        ends = f"of at least {self.low}" if self.high == math.inf else f"{self.low} to {self.high}"
        return f"{kind} {ends}{' or None' if self.optional else ''}"


def _size(hint: str, *, optional: bool = False) -> _Range:
    return _Range(1, math.inf, hint, optional=optional)


_SAMPLING_RANGES = {
    "max_tokens": _size("the most tokens to generate"),
    "temperature": _Range(0.0, math.inf, "0 takes the most likely token", whole=False),
    "top_k": _Range(0, math.inf, "how many of the most likely tokens may be chosen; 0 is all"),
    "top_p": _Range(0.0, 1.0, "the share of probability that may be chosen", whole=False),
    "min_p": _Range(0.0, 1.0, "probability needed, relative to the likeliest", whole=False),
    "repetition_penalty": _Range(0.01, 100.0, "1 is off, above 1 repeats less", whole=False),
    "presence_penalty": _Range(-2.0, 2.0, "0 is off, above 0 repeats less", whole=False),
    "frequency_penalty": _Range(-2.0, 2.0, "0 is off, above 0 repeats less", whole=False),
    "seed": _Range(-(2**63), 2**63 - 1, "leave it out for a random one", optional=True),
    "logprobs": _Range(0, MAX_LOGPROBS, "how many likely tokens to report", optional=True),
    "min_tokens": _Range(0, math.inf, "tokens before the end may come"),
}
CHECKPOINT_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of SamplingParams that a checkpoint may have defaults for."""
_BIAS = _Range(-100.0, 100.0, "it is added to the token's logit", whole=False)
_ID = _Range(0, _MAX_ID, "ids come from the model's tokenizer")


@dataclass(frozen=True)
class Constraint:
    """What the text of an answer must match; RequestError for a kind that is none.

    Whether the text means anything is found when it is compiled: `winnow.engine.grammar`.
    """

    kind: str
    """One of `CONSTRAINT_KINDS`."""
    text: str = ""
    """A schema in JSON, a pattern, or a structural tag in JSON; empty for json_object alone."""

    def __post_init__(self) -> None:
        if self.kind not in CONSTRAINT_KINDS:
            raise RequestError(
                f"constraint {self.kind!r} is none: use one of {', '.join(CONSTRAINT_KINDS)}"
            )
        if not isinstance(self.text, str):
            raise RequestError(f"the text of a {self.kind} is {self.text!r}: give a string")
        if bool(self.text) == (self.kind == "json_object"):
            raise RequestError(
                f"a {self.kind} with a text of {len(self.text)} characters: "
                "json_object has none, the others need one"
            )


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued. RequestError names a wrong value and what it may be.

    The stages that use these numbers, and their order, are those of `winnow.ops.sample`.
    """

    max_tokens: int = 128
    """A paragraph: enough to see an answer, too few to hold pages for long by accident."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """The same seed and prompt give the same tokens; None lets the engine draw one."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    """How many of the most likely tokens to report at each place; 0 reports the chosen alone."""
    stop: tuple[str, ...] = ()
    """Text that ends the answer; one string counts as a tuple of one."""
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """Whether special tokens of the answer are left out of its text."""
    constraint: Constraint | None = None
    """What the answer must match; it ends where nothing may follow."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if name != "constraint":
                _set(self, name, self.check_option(name, getattr(self, name), name))
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, max_tokens is {self.max_tokens}: "
                f"raise max_tokens to {self.min_tokens} or lower min_tokens"
            )
        self._check_constraint()

    def _check_constraint(self) -> None:
        """A grammar says where the answer ends, so nothing else may say that it goes on."""
        if self.constraint is None:
            return
        if not isinstance(self.constraint, Constraint):
            raise RequestError(f"constraint is {self.constraint!r}: give a Constraint or None")
        if self.min_tokens or self.ignore_eos:
            given = f"min_tokens is {self.min_tokens}" if self.min_tokens else "ignore_eos is True"
            raise RequestError(
                f"{given} beside a {self.constraint.kind} constraint, which decides where the "
                "answer ends: give only one"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy does not travel between processes; a dict does.
        values = (getattr(self, f.name) for f in fields(self))
        plain = (dict(v) if isinstance(v, Mapping) else v for v in values)
        return type(self), tuple(plain)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """From words and values; RequestError for a word that is no option."""
        _refuse_unknown(cls, options, RequestError)
        return cls(**options)

    @classmethod
    def check_option(cls, name: str, value: object, called: str) -> Any:
        """A value as a field but `constraint` keeps it; RequestError names it as `called`."""
        match name:
            case "stop":
                return _stops(called, value)
            case "stop_ids":
                return _ids(called, value)
            case "logit_bias":
                return _bias(called, value)
            case "ignore_eos" | "skip_special_tokens":
                return _flag(called, value, RequestError)
        return _SAMPLING_RANGES[name].check(called, value, RequestError)

    def check_vocabulary(self, vocab_size: int) -> None:
        """RequestError for an id that a model with `vocab_size` tokens does not have."""
        check_ids("logit_bias", self.logit_bias, vocab_size)
        check_ids("stop_ids", self.stop_ids, vocab_size)


def check_ids(called: str, ids: Iterable[int], vocab_size: int) -> None:
    """RequestError for an id that a model with `vocab_size` tokens does not have."""
    for token_id in ids:
        if token_id >= vocab_size:
            raise RequestError(
                f"{called} names token {token_id}, the vocabulary has {vocab_size}: "
                f"use ids from 0 to {vocab_size - 1}"
            )


_ENGINE_RANGES = {
    "max_step_tokens": _size("tokens in one step; longer prompts are cut", optional=True),
    "max_running": _size("requests computed side by side; the others wait"),
    "num_pages": _size("pages of 128 tokens; leave it out to fill the memory", optional=True),
    "cache_bytes": _size("memory for pages; leave it out to fill what there is", optional=True),
    "max_model_len": _size("tokens of prompt and answer; None is the model's own", optional=True),
    "memory_fraction": _Range(
        0.01, 1.0, "the share of a device's memory to use", whole=False, optional=True
    ),
}


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is built. UnsupportedError names a wrong value and what it may be.

    None leaves the choice to the engine, which knows the model and the machine.
    """

    kv_format: str = "model"
    """One of `CACHE_FORMATS`; `model` is the compute dtype."""
    index_format: str = "model"
    max_step_tokens: int | None = None
    """Tokens of all requests in one step: bounds a step's time, so also the wait of a decode. None:
    512 on a CPU, where more make a step seconds long and gain little, 2048 on a GPU."""
    max_running: int = 256
    num_pages: int | None = None
    cache_bytes: int | None = None
    """Another way to say `num_pages`; only one of the two may be given."""
    memory_fraction: float | None = None
    """Of a GPU's memory, all of it; on a CPU of what is free. None: 0.9 there, 0.25 here."""
    cuda_graphs: bool = True
    """Whether decode steps on a GPU are captured once a shape and replayed."""
    prefix_caching: bool = True
    max_model_len: int | None = None
    device: str = "cpu"
    """cpu, cuda, or cuda:N."""
    dtype: str | None = None
    backend: str | None = None
    """A name that `winnow.ops.table` knows: only that module judges it."""

    def __post_init__(self) -> None:
        for name, allowed in _ENGINE_RANGES.items():
            _set(self, name, allowed.check(name, getattr(self, name), UnsupportedError))
        _flag("prefix_caching", self.prefix_caching, UnsupportedError)
        _flag("cuda_graphs", self.cuda_graphs, UnsupportedError)
        _check_choice("kv_format", self.kv_format, CACHE_FORMATS)
        _check_choice("index_format", self.index_format, CACHE_FORMATS)
        if self.dtype is not None:
            _check_choice("dtype", self.dtype, DTYPES)
        if not (isinstance(self.device, str) and re.fullmatch(r"cpu|cuda(:[0-9]+)?", self.device)):
            raise UnsupportedError(f"device is {self.device!r}: use cpu, cuda, or cuda:N")
        if not (self.backend is None or isinstance(self.backend, str)):
            raise UnsupportedError(f"backend is {self.backend!r}: give a name or leave it out")
        if self.num_pages is not None and self.cache_bytes is not None:
            raise UnsupportedError(
                f"num_pages is {self.num_pages} and cache_bytes is {self.cache_bytes}: "
                "both size the same cache, so give only one"
            )

    @property
    def step_tokens(self) -> int:
        """`max_step_tokens`, or the device's own."""
        return self.max_step_tokens or (512 if self.device == "cpu" else 2048)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """From words and values; UnsupportedError for a word that is no option."""
        _refuse_unknown(cls, options, UnsupportedError)
        return cls(**options)


def _set(config: object, name: str, value: object) -> None:
    object.__setattr__(config, name, value)


def _flag(name: str, value: object, error: type[WinnowError]) -> bool:
    if not isinstance(value, bool):
        raise error(f"{name} is {value!r}: give True or False")
    return value


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UnsupportedError(f"{name} is {value!r}: use one of {', '.join(choices)}")


def _refuse_unknown(
    cls: type[SamplingParams] | type[EngineConfig],
    options: Mapping[str, Any],
    error: type[WinnowError],
) -> None:
    known = [f.name for f in fields(cls)]
    for name in options:
        if name not in known:
            close = get_close_matches(str(name), known, n=1)
            advice = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise error(f"there is no option {name!r}: {advice}")


def _stops(called: str, stops: object) -> tuple[str, ...]:
    texts = (stops,) if isinstance(stops, str) else stops
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{called} is {stops!r}; it takes a string or a list of strings")
    if len(texts) > MAX_STOPS:
        raise RequestError(f"{called} holds {len(texts)} strings; it takes up to {MAX_STOPS}")
    for text in texts:
        if not text:
            raise RequestError(
                f"{called} holds an empty string, which every text contains: remove it"
            )
        part = next((c for c in text if c == "\ufffd" or "\ud800" <= c <= "\udfff"), None)
        if part is not None:
            raise RequestError(
                f"{called} string {text!r} holds {part!r}, which is part of a character and never "
                "comes whole in decoded text: give whole characters, or ids of tokens"
            )
    return tuple(texts)


def _ids(called: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise RequestError(f"{called} is {ids!r}; it takes a list of token ids")
    for token_id in ids:
        _ID.check(f"a token of {called}", token_id, RequestError)
    return tuple(ids)


def _bias(called: str, bias: object) -> Mapping[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"{called} is {bias!r}; it takes a map from token id to number")
    checked: dict[int, float] = {}
    for token_id, value in bias.items():
        _ID.check(f"a token of {called}", token_id, RequestError)
        checked[token_id] = _BIAS.check(f"{called} of token {token_id}", value, RequestError)
    return MappingProxyType(checked)
