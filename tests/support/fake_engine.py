"""An engine without a model, for what the server does around one: counts words, at a set pace."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from winnow.config import Constraint, SamplingParams
from winnow.engine.messages import ModelInfo, Stepped
from winnow.engine.output import EngineStats, Output, Usage
from winnow.errors import PeerError, WinnowError
from winnow.ops.sample import Logprobs

INFO = ModelInfo(
    name="fake",
    vocab_size=300,
    max_model_len=4096,
    num_pages=32,
    page_tokens=128,
    max_running=4,
    kv_format="nvfp4",
    index_format="nvfp4",
    dtype="float32",
    backend="cpu",
    eos_ids=(0,),
    default_sampling={"temperature": 0.25, "top_p": 0.75},
)
DEATH = "the engine's process was ended by SIGKILL"


class FakeStream:
    """Gives out the word of each token's number, `max_tokens` of them."""

    queue_s = 0.001

    def __init__(
        self, engine: FakeEngine, request_id: str, prompt: int, params: SamplingParams
    ) -> None:
        self._engine = engine
        self._request_id = request_id
        self._prompt = prompt
        self._tokens = min(params.max_tokens, engine.most_tokens)
        self._top = params.logprobs
        self._given = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        engine, request_id = self._engine, self._request_id
        if request_id not in engine.live:
            raise StopAsyncIteration
        if engine.refusal is not None:
            engine.live.discard(request_id)
            return Output(request_id, finish_reason="error", error=engine.refusal)
        await engine.turn()
        if engine.is_dead:
            raise PeerError(DEATH)
        self._given += 1
        ended = self._given == self._tokens
        if ended:
            engine.live.discard(request_id)
        engine.step()
        return Output(
            request_id,
            token_ids=(self._given % 256,),
            text=engine.says(self._given - 1),
            logprobs=() if self._top is None else (likely(self._top),),
            finish_reason="length" if ended else None,
            usage=Usage(self._prompt, self._given, 0) if ended else None,
        )


def likely(count: int) -> Logprobs:
    """The same logprobs for every token."""
    return Logprobs(-1.0, tuple((token, -1.0 - token) for token in range(count)))


class FakeEngine:
    """`winnow.server.client.EngineClient` as endpoints see it."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.aborted: list[str] = []
        self.submitted: list[tuple[Sequence[int], SamplingParams]] = []
        self.word = "word "
        self.copies = 1
        self.script: list[str] | None = None
        """Text of each token, instead of `copies` of `word`."""
        self.most_tokens = INFO.max_model_len
        self.gap_s = 0.0
        self.held = False
        """Answers wait while it is set."""
        self.is_dead = False
        self.refusal: WinnowError | None = None
        self.on_step = None

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str = "",
        grammar: bytes | None = None,
    ) -> FakeStream:
        if self.is_dead:
            raise PeerError(DEATH)
        self.live.add(request_id)
        self.submitted.append((tuple(prompt_ids), params))
        return FakeStream(self, request_id, len(prompt_ids), params)

    def abort(self, *request_ids: str) -> None:
        self.aborted += [i for i in request_ids if i in self.live]
        self.live -= set(request_ids)

    async def turn(self) -> None:
        """Wait as long as a step would take."""
        await asyncio.sleep(self.gap_s)
        while self.held and not self.is_dead:
            await asyncio.sleep(0.005)

    def says(self, index: int) -> str:
        """Text of a token of an answer."""
        if self.script is not None:
            return self.script[index] if index < len(self.script) else ""
        return self.word * self.copies

    def step(self) -> None:
        """Tell of the step, as the client does."""
        if self.on_step is not None:
            stats = EngineStats(len(self.live), 0, len(self.live), 0, INFO.num_pages, 0, 0, 0, 0, 0)
            self.on_step(Stepped((), stats, self.gap_s))


class FakeGrammars:
    """Compiles nothing, or raises `refusal`."""

    def __init__(self) -> None:
        self.refusal: Exception | None = None

    async def compile(self, constraint: Constraint) -> bytes:
        if self.refusal is not None:
            raise self.refusal
        return constraint.text.encode()
