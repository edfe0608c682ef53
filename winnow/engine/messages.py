"""What a front process and the engine's process say to each other. Plain data without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from winnow.config import EngineConfig, SamplingParams
from winnow.engine.output import EngineStats, Output


@dataclass(frozen=True)
class Build:
    """The first command: what to serve. `options` are further ones of `build_engine`."""

    model: str
    config: EngineConfig
    options: Mapping[str, Any]
    log_level: int


@dataclass(frozen=True)
class Add:
    """Begin a request, whose id was never used before. `grammar` is `params.constraint` compiled
    and dumped, if there is one."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    cache_salt: str = ""
    grammar: bytes | None = None


@dataclass(frozen=True)
class Abort:
    """End these requests before the next step; those that have ended already are let be."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Stop:
    """End the process, whatever is running."""


Command = Build | Add | Abort | Stop


@dataclass(frozen=True)
class ModelInfo:
    """What is served, and within which bounds."""

    name: str
    """As it was asked for: a directory, or a preset."""
    vocab_size: int
    max_model_len: int
    """Tokens of prompt and answer together, no more than the pages hold."""
    num_pages: int
    """Pages that requests can hold."""
    page_tokens: int
    max_running: int
    kv_format: str
    index_format: str
    dtype: str
    backend: str
    eos_ids: tuple[int, ...]
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    """Options of SamplingParams, by their names there, of requests that do not give them."""
    notes: tuple[str, ...] = ()
    """What had to be decided about the checkpoint."""


@dataclass(frozen=True)
class Loading:
    """`done` of `total` bytes of `what` are in memory."""

    done: int
    total: int
    what: str


@dataclass(frozen=True)
class Ready:
    """The model is loaded; commands are obeyed from now on."""

    model: ModelInfo


@dataclass(frozen=True)
class Stepped:
    """A step was computed, or commands were obeyed between steps.

    `started` had their first rows in this step. `step_s` is the seconds that the step took, 0.0
    where there was none.
    """

    outputs: tuple[Output, ...]
    stats: EngineStats
    step_s: float
    started: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failed:
    """The process ends, with this sentence as its last word."""

    message: str


Event = Loading | Ready | Stepped | Failed
