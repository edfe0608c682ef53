"""The engine: takes requests, runs steps, gives back tokens and text.

Owns the live requests and what they ask of sampling and text. Which request runs is core's
decision, how a step is computed the runner's. One request's failure ends that request alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from winnow.config import SamplingParams
from winnow.core.plan import StepPlan
from winnow.core.request import Request
from winnow.core.scheduler import Scheduler
from winnow.engine.live import LiveRequest
from winnow.engine.output import EngineStats as EngineStats
from winnow.engine.output import Output, Usage
from winnow.engine.runner import Runner
from winnow.engine.text import Tokenizer
from winnow.errors import CapacityError, RequestError, WinnowError
from winnow.ops.paged import Clipping
from winnow.ops.sample import Logprobs
from winnow.spec.model import BLOCK_TOKENS, ModelSpec

if TYPE_CHECKING:
    from winnow.engine.grammar import GrammarCompiler


class Engine:
    """One model being served. Not thread-safe: one owner calls it."""

    def __init__(
        self,
        spec: ModelSpec,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        default_params: SamplingParams | None = None,
    ) -> None:
        self.spec = spec
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.default_params = default_params or SamplingParams()
        """For requests without any: what the checkpoint's generation_config.json says."""
        self.started: tuple[str, ...] = ()
        """Requests that had their first rows in the last step."""
        self._live: dict[str, LiveRequest] = {}
        self._grammars: GrammarCompiler | None = None
        self._clipping: Clipping | None = None
        self._clipping_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def max_request_tokens(self) -> int:
        """Tokens of prompt and answer that a request may have: what the model takes, or what the
        cache holds where that is less."""
        return min(self.max_model_len, self.scheduler.cache.pool.num_usable * BLOCK_TOKENS)

    def add(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        cache_salt: str = "",
        grammar: bytes | None = None,
    ) -> None:
        """Queue a request; nothing is computed yet.

        `prompt` is text or token ids. Requests with different `cache_salt` share no cached
        prefix. `grammar` is `params.constraint` compiled elsewhere and dumped; without it the
        constraint is compiled here, however long that takes. Raises RequestError for a request
        that is wrong and CapacityError for one that can never fit; both leave the engine as it was.
        """
        params = params or self.default_params
        prompt_ids = self._prompt_ids(prompt)
        self._check(prompt_ids, params)
        stop_ids = set(params.stop_ids)
        if not params.ignore_eos:
            stop_ids |= set(self.spec.eos_ids)
        request = Request(
            request_id=request_id,
            prompt=prompt_ids,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_ids=frozenset(stop_ids),
            cache_salt=cache_salt,
        )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        matcher = None
        if params.constraint is not None:
            matcher = self.grammars().matcher(params.constraint, grammar)
        live = LiveRequest(request, params, seed, self.tokenizer, matcher)
        self.scheduler.add(request)
        self._live[request_id] = live

    def grammars(self) -> GrammarCompiler:
        """The grammars of this model's vocabulary; takes seconds the first time.

        RequestError without a tokenizer, or without the library (winnow-llm[grammar]).
        """
        if self.tokenizer is None:
            raise RequestError(
                "a constraint needs a tokenizer.json in the checkpoint: leave it out"
            )
        if self._grammars is None:
            # Loads a library that takes longer than all else, and that few offline runs need.
            from winnow.engine.grammar import GrammarCompiler

            spec = self.spec
            self._grammars = GrammarCompiler(self.tokenizer, spec.vocab_size, spec.eos_ids)
        return self._grammars

    def abort(self, request_id: str) -> bool:
        """End a request and free its pages; False if it has ended already."""
        self._live.pop(request_id, None)
        return self.scheduler.abort(request_id)

    def end_all(self) -> None:
        """End every request without an output; what they computed is not found again."""
        self._live.clear()
        self.started = ()
        self.runner.drop_ahead()
        self.scheduler.end_all("error")

    def step(self) -> list[Output]:
        """Compute one step: what each request that moved on has to say, in the plan's order.

        An exception, an interrupt among them, ends all requests and empties the cache before it is
        raised: how much of the step was done is not known. The engine then serves what is added.
        """
        try:
            return self._step()
        except BaseException:
            self.end_all()
            raise

    def _step(self) -> list[Output]:
        admit = not self.runner.is_ahead
        plan = self.scheduler.plan(admit)
        if not plan.rows and not admit:
            # Nobody is left whom the step that was begun could serve.
            self.runner.drop_ahead()
            admit, plan = True, self.scheduler.plan()
        self.started = self._start(plan)
        if not plan.rows:
            return []
        requests = {r.request_id: self._live[r.request_id].request for r in plan.rows}
        sampling = {
            r.request_id: self._live[r.request_id].sample_row() for r in plan.rows if r.samples
        }
        # While a step is begun, nobody is admitted: who waits gets every second step at least.
        go_ahead = admit or not self.scheduler.stats().num_waiting
        found = self.runner.run(plan, requests, sampling, go_ahead)
        tokens: dict[str, int] = {}
        outputs: list[Output] = []
        for request_id, result in found.items():
            if result.token < 0:
                outputs.append(self._fail(request_id, self._live[request_id].not_sampled()))
            else:
                tokens[request_id] = result.token
        self.scheduler.complete(plan, tokens)
        outputs += [self._advance(r, token, found[r].logprobs) for r, token in tokens.items()]
        return outputs

    def stats(self, max_age_s: float = 0.0) -> EngineStats:
        """Counts at this moment. Those of values, for which a device is waited for, may be those of
        an earlier call, of `max_age_s` seconds ago at most."""
        if self._clipping is None or monotonic() - self._clipping_s >= max_age_s:
            self._clipping, self._clipping_s = self.runner.storage.clipping(), monotonic()
        counts, clipping = self.scheduler.stats(), self._clipping
        return EngineStats(
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            pages_used=counts.pages_used,
            pages_cached=counts.pages_cached,
            pages_total=self.scheduler.cache.pool.num_usable,
            preemptions=counts.preemptions,
            prefix_query_tokens=counts.prefix_query_tokens,
            prefix_hit_tokens=counts.prefix_hit_tokens,
            values_written=clipping.written,
            values_clipped=clipping.clipped,
        )

    def _start(self, plan: StepPlan) -> tuple[str, ...]:
        """The requests of a plan that no plan before it had."""
        new = tuple(r.request_id for r in plan.rows if not self._live[r.request_id].has_started)
        for request_id in new:
            self._live[request_id].has_started = True
        return new

    def _advance(self, request_id: str, token: int, logprobs: Logprobs | None) -> Output:
        """Text and end of a request that got a token."""
        live = self._live[request_id]
        try:
            text, stopped = live.push(token)
        except RequestError as error:
            return self._fail(request_id, error)
        if stopped and not live.request.is_finished:
            self.scheduler.finish(request_id, "stop")
        reason = "stop" if stopped else live.request.finish_reason
        if reason is not None:
            del self._live[request_id]
        return Output(
            request_id=request_id,
            token_ids=(token,),
            text=text,
            logprobs=() if logprobs is None else (logprobs,),
            finish_reason=reason,
            usage=None if reason is None else _usage(live.request),
        )

    def _fail(self, request_id: str, error: WinnowError) -> Output:
        """End one request with an error; what it computed is not found again in the cache."""
        live = self._live.pop(request_id)
        if not live.request.is_finished:
            self.scheduler.finish(request_id, "error")
        return Output(
            request_id=request_id,
            text=None if live.detokenizer is None else "",
            finish_reason="error",
            usage=_usage(live.request),
            error=error,
        )

    def _prompt_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json: give token ids, not text")
        return tuple(self.tokenizer.encode(prompt))

    def _check(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        """RequestError for what the model or its tokenizer cannot do, CapacityError for what is too
        long for it."""
        if not prompt:
            raise RequestError("the prompt has 0 tokens: give at least 1")
        for place, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(f"prompt token {place} is {token!r}, not a whole number")
            if not 0 <= token < self.spec.vocab_size:
                raise RequestError(
                    f"prompt token {place} is {token}, the vocabulary has {self.spec.vocab_size}: "
                    f"use ids from 0 to {self.spec.vocab_size - 1}"
                )
        params.check_vocabulary(self.spec.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer.json in the checkpoint: use stop_ids")
        if len(prompt) + params.max_tokens > self.max_model_len:
            raise CapacityError(
                f"{len(prompt)} prompt tokens and max_tokens {params.max_tokens} make "
                f"{len(prompt) + params.max_tokens}, the engine takes {self.max_model_len}: "
                + _advice(len(prompt), self.max_model_len)
            )


def _advice(prompt_tokens: int, limit: int) -> str:
    room = limit - prompt_tokens
    if room < 1:
        return f"shorten the prompt by {1 - room} tokens at least"
    return f"lower max_tokens to {room}"


def _usage(request: Request) -> Usage:
    return Usage(len(request.prompt), len(request.output), request.num_cached)
