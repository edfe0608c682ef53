"""Answers of one request, from the engine's process: submit, merge, count, abort. Knows no text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from winnow.config import SamplingParams
from winnow.engine.output import Output
from winnow.errors import WinnowError
from winnow.server.failures import ApiError, failure_of
from winnow.server.record import RequestRecord
from winnow.server.serving import OutputStream, Serving


@dataclass(frozen=True)
class Job:
    """One answer to compute."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    cache_salt: str = ""
    grammar: bytes | None = None


async def generate(
    serving: Serving, record: RequestRecord, jobs: Sequence[Job]
) -> AsyncGenerator[tuple[int, Output]]:
    """Outputs of all jobs as they come, each with its job's index.

    Close the generator (`contextlib.aclosing`): whatever still runs is then aborted. ApiError where
    the engine refuses a job or fails at it, which ends the other jobs too; PeerError if the
    engine's process dies.
    """
    clock = asyncio.get_running_loop().time
    counters = [_Counter(serving, record, job, clock()) for job in jobs]
    ids = [str(next(serving.engine_ids)) for _ in jobs]
    running = dict(enumerate(ids))
    try:
        streams = {
            index: serving.engine.submit(
                request_id, job.prompt_ids, job.params, job.cache_salt, job.grammar
            )
            for (index, request_id), job in zip(running.items(), jobs, strict=True)
        }
        async for index, output in _merged(streams):
            counters[index].take(output, streams[index].queue_s, clock())
            if output.finish_reason is not None:
                del running[index]
            if output.finish_reason == "error":
                raise _failure(output)
            yield index, output
    finally:
        for index, request_id in running.items():
            serving.engine.abort(request_id)
            counters[index].end("abort", clock())


class _Counter:
    """What one answer adds to the log's line and to the metrics."""

    def __init__(self, serving: Serving, record: RequestRecord, job: Job, now: float) -> None:
        self._serving = serving
        self._record = record
        self._prompt_tokens = len(job.prompt_ids)
        record.prompt_tokens += self._prompt_tokens
        self._newest: float | None = None

    def take(self, output: Output, queue_s: float | None, now: float) -> None:
        record, metrics = self._record, self._serving.metrics
        count = len(output.token_ids)
        if count:
            if self._newest is None:
                waited = now - record.began_s
                metrics.first_token(waited, self._prompt_tokens)
                metrics.tokens(count, None)
                if queue_s is not None:
                    metrics.queued(queue_s)
                if record.first_token_s is None:
                    record.first_token_s, record.queued_s = waited, queue_s
            else:
                metrics.tokens(count, (now - self._newest) / count)
            self._newest = now
            record.completion_tokens += count
        if output.finish_reason is not None:
            if output.usage is not None:
                record.cached_tokens += output.usage.cached_tokens
            self.end(output.finish_reason, now)

    def end(self, reason: str, now: float) -> None:
        self._record.finish_reasons.append(reason)
        self._serving.metrics.finished(reason, now - self._record.began_s)
        if reason != "abort":
            self._serving.admission.ended()


async def _merged(
    streams: Mapping[int, OutputStream],
) -> AsyncIterator[tuple[int, Output]]:
    """Each stream's outputs in its order; of several streams, whichever has one."""
    if len(streams) == 1:
        ((index, stream),) = streams.items()
        async for output in stream:
            yield index, output
        return
    waiting = {asyncio.ensure_future(anext(stream, None)): i for i, stream in streams.items()}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                index = waiting.pop(future)
                news = future.result()
                if news is not None:
                    waiting[asyncio.ensure_future(anext(streams[index], None))] = index
                    yield index, news
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _failure(output: Output) -> ApiError:
    """A refused job is the request's fault; one that failed while it ran is not."""
    error = output.error or WinnowError("the engine ended the request without saying why")
    if output.usage is None:
        return failure_of(error)
    return ApiError(500, str(error), code="model_failed")
