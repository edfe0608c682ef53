"""What every endpoint shares: the engine's client, the text side, the counts. Decides nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from winnow.config import Constraint, SamplingParams
from winnow.engine.messages import ModelInfo, Stepped
from winnow.engine.output import Output
from winnow.engine.text import Tokenizer
from winnow.errors import RequestError
from winnow.server.admission import Admission
from winnow.server.failures import ApiError
from winnow.server.metrics import Metrics
from winnow.server.settings import ServerConfig
from winnow.server.template import ChatTemplate


class OutputStream(Protocol):
    """Outputs of one answer; `queue_s` is known by its first token."""

    @property
    def queue_s(self) -> float | None: ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Output: ...


class Engine(Protocol):
    """What endpoints ask of the engine's process; `winnow.server.client` has the real one."""

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str = "",
        grammar: bytes | None = None,
    ) -> OutputStream: ...

    def abort(self, *request_ids: str) -> None: ...


class Grammars(Protocol):
    """Where constraints become grammars; `winnow.server.grammars` has the real one."""

    async def compile(self, constraint: Constraint) -> bytes: ...


@dataclass
class Serving:
    """One server while it runs."""

    config: ServerConfig
    engine: Engine
    grammars: Grammars
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    admission: Admission
    metrics: Metrics
    model_name: str
    created: int
    """Seconds of the Unix epoch, for /v1/models."""
    cut: asyncio.Future[ApiError]
    """Set where what is under way must end now, with this."""
    info: ModelInfo | None = None
    loading: tuple[int, int] = (0, 0)
    """Bytes of weights in memory, and in all."""
    engine_ids: Iterator[int] = field(default_factory=itertools.count)
    """The engine's ids of answers: never those of clients, who may send one twice."""

    def ready(self, info: ModelInfo) -> None:
        """The engine answers from now on."""
        self.info = info
        self.admission.open(info.max_running)

    def model(self) -> ModelInfo:
        """What is served; ApiError 503 where nothing is."""
        self.admission.check_open()
        assert self.info is not None
        return self.info

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for another model than ours."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"there is no model {name[:200]!r}: this server has {self.model_name!r}",
                code="model_not_found",
                param="model",
            )

    def text(self) -> Tokenizer:
        """The tokenizer; RequestError for a checkpoint without one."""
        if self.tokenizer is None:
            raise RequestError(
                "this checkpoint has no tokenizer.json: send token ids to /v1/completions"
            )
        return self.tokenizer

    def on_step(self, stepped: Stepped) -> None:
        """Keep the newest counts."""
        self.metrics.stats = stepped.stats
