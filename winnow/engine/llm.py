"""Offline use: prompts in, completions out, in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from winnow.config import EngineConfig, SamplingParams
from winnow.engine.build import build_engine
from winnow.engine.output import Output, Usage
from winnow.engine.turns import Turns
from winnow.errors import RequestError, WinnowError
from winnow.ops.sample import Logprobs

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """What one prompt led to. `text` is None without a tokenizer; `error` is set when
    `finish_reason` is error, and then the tokens are those before it."""

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    usage: Usage | None
    logprobs: tuple[Logprobs, ...] = ()
    error: WinnowError | None = None


class LLM:
    """A model to call from Python.

    `model` is a checkpoint directory, or a preset's name with `random_weights=True`; `options`
    are the fields of `winnow.config.EngineConfig`. Threads may share it: they take turns at the
    engine's steps, each of which serves all.
    """

    def __init__(
        self,
        model: str,
        *,
        random_weights: bool = False,
        num_layers: int | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        self.engine = build_engine(
            model,
            EngineConfig.from_options(options),
            random=random_weights,
            num_layers=num_layers,
            progress=progress,
        )
        self.default_params = self.engine.default_params
        """Of calls without params: what the checkpoint's generation_config.json says of sampling.
        `dataclasses.replace()` changes a field; a `SamplingParams` of one's own knows nothing of
        the checkpoint."""
        self._ids = count()
        self._mail: dict[str, deque[Output]] = {}
        self._turns = Turns()
        """At the engine and the mail, which are one thread's at a time, a step long."""
        self._left: deque[str] = deque()
        """Requests that nobody reads any more, to be ended by whoever has the turn."""

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continue every prompt, together; one completion a prompt, in order.

        `prompts` are texts or lists of token ids, or one text; `params` one for all, or one each.
        A prompt that cannot be served has finish_reason error and does not disturb the others.
        RequestError for what is neither. Any other exception, as an interrupt, ends the requests of
        all threads, whose completions say so; the next call is served as any.
        """
        prompts = _prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        for own in each:
            _check_params(own)
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts but {len(each)} SamplingParams: give one each"
            )
        outputs: dict[str, list[Output]] = {}
        try:
            for prompt, own in zip(prompts, each, strict=True):
                request_id = self._next_id()
                outputs[request_id] = []
                try:
                    self._add(request_id, prompt, own)
                except WinnowError as error:
                    failed = Output(request_id, finish_reason="error", error=error)
                    outputs[request_id] = [failed]
            for request_id, parts in outputs.items():
                while not parts or parts[-1].finish_reason is None:
                    parts.append(self._next_output(request_id))
        finally:
            self._leave(outputs)
        return [_merge(parts) for parts in outputs.values()]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Output]:
        """Continue one prompt, giving outputs as they come. Leaving the loop aborts the request.

        The request begins with the first output that is asked for, which raises RequestError or
        CapacityError if the prompt cannot be served; so one that is never asked for costs nothing.
        """
        _check_params(params)
        return self._stream(self._next_id(), _prompt(prompt), params)

    def _stream(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None
    ) -> Iterator[Output]:
        try:
            self._add(request_id, prompt, params)
            while True:
                output = self._next_output(request_id)
                if output.error is not None:
                    raise output.error
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._leave([request_id])

    def _add(self, request_id: str, prompt: Prompt, params: SamplingParams | None) -> None:
        with self._turn():
            self.engine.add(request_id, prompt, params)
            self._mail[request_id] = deque()

    def _next_output(self, request_id: str) -> Output:
        """The next output of a request; steps the engine, which may serve others meanwhile."""
        while True:
            with self._turn():
                if self._mail[request_id]:
                    return self._mail[request_id].popleft()
                try:
                    for output in self.engine.step():
                        self._mail[output.request_id].append(output)
                except BaseException as error:
                    self._end_all(error)
                    raise

    def _end_all(self, error: BaseException) -> None:
        """After a step that broke off, perhaps between two of its outputs: who waits for more of
        them, in other threads, is told that there will be none."""
        self.engine.end_all()
        cause = f"{type(error).__name__}: {error}".removesuffix(": ")
        told = WinnowError(
            f"a step of the engine broke off ({cause}), which ended all requests: ask again"
        )
        for request_id, mail in self._mail.items():
            if not mail or mail[-1].finish_reason is None:
                mail.append(Output(request_id, finish_reason="error", error=told))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._turns:
            self._end_left()
            try:
                yield
            finally:
                self._end_left()

    def _leave(self, request_ids: Iterable[str]) -> None:
        """End requests if they have not ended. Waits for nobody: a stream that is thrown away is
        closed by the collector, perhaps within a step of this very thread."""
        self._left.extend(request_ids)
        if self._turns.take_at_once():
            try:
                self._end_left()
            finally:
                self._turns.end()

    def _end_left(self) -> None:
        while self._left:
            request_id = self._left.popleft()
            self.engine.abort(request_id)
            self._mail.pop(request_id, None)

    def _next_id(self) -> str:
        return f"offline-{next(self._ids)}"


def _prompts(given: object) -> list[Prompt]:
    """One text, or what stands in a sequence of prompts."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Sequence):
        raise RequestError(f"prompts are {given!r}: give texts or lists of token ids")
    return [_prompt(one) for one in given]


def _prompt(given: object) -> Prompt:
    """Token ids are the engine's to judge."""
    if isinstance(given, str | Sequence) and not isinstance(given, bytes):
        return given
    ids = ", in a list of prompts: [[1, 2]]" if isinstance(given, int) else ""
    raise RequestError(f"a prompt is {given!r}: give a text or a list of token ids{ids}")


def _check_params(given: object) -> None:
    if given is not None and not isinstance(given, SamplingParams):
        raise RequestError(
            f"params are {given!r}: give SamplingParams(...), one for all prompts or one each"
        )


def _merge(parts: list[Output]) -> Completion:
    last = parts[-1]
    texts = [part.text for part in parts if part.text is not None]
    return Completion(
        token_ids=tuple(token for part in parts for token in part.token_ids),
        text="".join(texts) if texts else None,
        finish_reason=last.finish_reason or "abort",
        usage=last.usage,
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        error=last.error,
    )
