"""What HTTP costs: tokens per second of the engine alone and through the server, in one run.

Both serve the same prompts to the same number of tokens, 64 at once, greedy, in turns, on
`OMP_NUM_THREADS` threads: all cores but one unless it is set, as `winnow serve` does. Every token
of the server's answer is streamed as it comes. The client is this process and shares the cores, so
its cost counts as the server's. Prints both and the ratio.

    python benchmarks/http_overhead.py [MODEL] [--streams N] [--tokens N] [--rounds N] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.served import Served

from winnow.bench.machine import commit, machine, software
from winnow.bench.record import Record, append

PROMPT_TOKENS = 32
NUM_PAGES = 512
STEP_TOKENS = 2048
"""As in the records: all prompts of a round in one step."""


def prompts(count: int) -> list[list[int]]:
    """No two begin alike, so that nothing is found in the prefix cache."""
    return [[(7 * i + 3 * j) % 200 + 1 for j in range(PROMPT_TOKENS)] for i in range(count)]


def engine_alone(pipe: Connection, model: str, tokens: int) -> None:
    """A process that serves `streams` prompts for each number it is sent; answers with seconds."""
    from winnow import LLM, SamplingParams

    llm = LLM(
        model, progress=False, num_pages=NUM_PAGES, max_step_tokens=STEP_TOKENS,
        prefix_caching=False,
    )  # fmt: skip
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    pipe.send(0.0)
    while streams := pipe.recv():
        start = time.perf_counter()
        answers = llm.generate(prompts(streams), params)
        seconds = time.perf_counter() - start
        assert all(len(a.token_ids) == tokens for a in answers), [a.error for a in answers]
        pipe.send(seconds)


class Stream(asyncio.Protocol):
    """Sends one request and counts what comes back, with as little work as can be."""

    def __init__(self, body: bytes, done: asyncio.Future[int]) -> None:
        self._body, self._done = body, done
        self._events, self._tail = 0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(self._body)}\r\n\r\n"
        )
        transport.write(head.encode() + self._body)

    def data_received(self, data: bytes) -> None:
        self._events += data.count(b"data: ")
        self._tail = (self._tail + data)[-64:]
        if b"[DONE]" in self._tail:
            self._transport.close()
            if not self._done.done():
                self._done.set_result(self._events - 1)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(f"the stream broke off: {self._tail!r}"))


async def through_http(port: int, streams: int, tokens: int) -> tuple[float, int]:
    """Seconds until the last of `streams` streams ended, and events in all."""
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    endings: list[asyncio.Future[int]] = []
    for prompt in prompts(streams):
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        done: asyncio.Future[int] = loop.create_future()
        endings.append(done)
        payload = json.dumps(body).encode()
        await loop.create_connection(lambda p=payload, d=done: Stream(p, d), "127.0.0.1", port)
    events = await asyncio.gather(*endings)
    return time.perf_counter() - start, sum(events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=engine_alone, args=(there, args.model, args.tokens), daemon=True
    )
    process.start()
    here.recv()
    alone: list[float] = []
    served: list[float] = []
    total = args.streams * args.tokens
    options = ("--num-pages", str(NUM_PAGES), "--max-step-tokens", str(STEP_TOKENS))
    with Served(args.model, *options, "--no-prefix-caching") as server:
        for turn in range(args.rounds + 1):
            here.send(args.streams)
            direct = here.recv()
            seconds, events = asyncio.run(through_http(server.port, args.streams, args.tokens))
            print(
                f"alone {total / direct:7.0f} tokens/s, served {total / seconds:7.0f}, "
                f"{events} events",
                flush=True,
            )
            if turn:  # the first of each builds kernels and touches memory
                alone.append(total / direct)
                served.append(total / seconds)
    here.send(0)
    process.join()
    ratios = [s / a for s, a in zip(served, alone, strict=True)]
    print(f"served / alone: {statistics.median(ratios):.3f} of {args.rounds} rounds")
    if args.out is not None:
        workload = {
            "model": args.model, "streams": args.streams,
            "prompt_tokens": PROMPT_TOKENS, "tokens": args.tokens,
        }  # fmt: skip
        conditions = {
            "formats": {"kv": "model", "index": "model"},
            "parallel": {"plan": "tp1", "devices": 1}, "acceptance": {"kind": "none"},
            "cache_state": "prefix caching off", "concurrency": args.streams,
            "latency_objective": {},
        }  # fmt: skip
        common = (workload, conditions, machine(int(threads)), software(), commit())
        rows = [("engine alone", "tokens/s", alone), ("through HTTP", "tokens/s", served)]
        rows += [("through HTTP / engine alone", "ratio", ratios)]
        append(args.out, [Record("serving", w, u, tuple(s), *common) for w, u, s in rows])


if __name__ == "__main__":
    main()
