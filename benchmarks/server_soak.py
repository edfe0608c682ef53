"""A soak of the server: mixed requests, many at a time, some aborted, some malformed.

What must hold, each as a line of the table and of the record: no answer above 499, malformed
requests refused with 4xx, no page held at the end, memory flat, and every finished answer equal
to the same request run alone afterwards (in fp32, where a row's result does not depend on the rows
beside it; in bf16 the products of a CPU do). Exits with 1 if one does not hold.

    python benchmarks/server_soak.py [MODEL] [--requests N] [--at-once N] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.served import Served

from winnow.bench.machine import commit, machine, software
from winnow.bench.record import Record, append

DISTINCT = 160
"""Different well-formed requests; each is sent several times, so prefixes and whole prompts hit."""
MAX_TOKENS = 40
ABORTED_SHARE = 0.2
"""Of the requests, that must really have been left before their end."""
WORDS = Path(__file__).parents[1].joinpath("docs", "architecture.md").read_text().split()
MALFORMED: tuple[bytes, ...] = (
    b"{",
    b"[]",
    b"null",
    b'{"messages": 1}',
    b'{"messages": []}',
    b'{"messages": [{"role": "user", "content": "x"}], "no_such_option": 1}',
    b'{"messages": [{"role": "nobody", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 100000000}',
    b'{"messages": [{"role": "user", "content": "x"}], "stop": [""]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b"[" * 100_000,
    b"\xff\xfe\x00",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "switch",
        "description": "Turn a lamp on or off.",
        "parameters": {
            "type": "object",
            "properties": {
                "room": {"type": "string", "enum": ["hall", "kitchen"]},
                "on": {"type": "boolean"},
            },
            "required": ["room", "on"],
        },
    },
}


@dataclass(frozen=True)
class Ask:
    """One well-formed request."""

    number: int
    path: str
    body: dict[str, Any] = field(hash=False)


@dataclass
class Tally:
    """What came back."""

    statuses: Counter[str] = field(default_factory=Counter)
    answers: list[tuple[Ask, Any]] = field(default_factory=list)
    aborted: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the start, bytes resident in all processes of the server)"""


def asks(count: int) -> list[Ask]:
    """Chats and completions over shared beginnings, each with a seed of its own."""
    draw = random.Random(1)
    openings = [" ".join(WORDS[:n]) for n in (20, 90, 260, 520)]
    made = []
    for number in range(count):
        own = " ".join(draw.choices(WORDS, k=draw.choice((3, 12, 40, 150))))
        prompt = f"{draw.choice(openings)} {own}" if draw.random() < 0.6 else own
        body: dict[str, Any] = {
            "max_tokens": draw.randint(1, MAX_TOKENS),
            "temperature": draw.choice((0.0, 0.7, 1.0)),
            "top_p": draw.choice((1.0, 0.9)),
            "seed": number,
        }
        if draw.random() < 0.1:
            body["n"] = 2
        if draw.random() < 0.2:
            body["stop"] = [draw.choice(("e", "the", "\n"))]
        if draw.random() < 0.4:
            made.append(Ask(number, "/v1/completions", {**body, "prompt": prompt}))
            continue
        body["messages"] = [{"role": "user", "content": prompt}]
        kind = draw.random()
        if kind < 0.15:
            body |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120}
        elif kind < 0.3:
            schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}}
            schema |= {"required": ["yes"], "additionalProperties": False}
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            body |= {"response_format": form, "max_tokens": 120}
        made.append(Ask(number, "/v1/chat/completions", body))
    return made


async def whole(client: httpx.AsyncClient, ask: Ask, tally: Tally | None) -> Any:
    """The answer's choices, not streamed; None unless 200."""
    reply = await client.post(ask.path, json=ask.body)
    if tally is not None:
        tally.statuses[str(reply.status_code)] += 1
    if reply.status_code != 200:
        return None
    return [_said(c.get("message", c), c["finish_reason"]) for c in reply.json()["choices"]]


async def streamed(
    client: httpx.AsyncClient, ask: Ask, tally: Tally, leave_after: int | None
) -> Any:
    """The answer's choices put together from a stream; None if it was left early or refused."""
    parts: dict[int, dict[str, Any]] = {}
    seen = 0
    async with client.stream("POST", ask.path, json={**ask.body, "stream": True}) as reply:
        tally.statuses[str(reply.status_code)] += 1
        if reply.status_code != 200:
            return None
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            seen += 1
            if leave_after is not None and seen > leave_after:
                tally.aborted += 1
                return None
            for choice in json.loads(line[6:])["choices"]:
                _take(parts.setdefault(choice["index"], {"calls": {}}), choice)
    return [
        _said({**p, "tool_calls": list(p["calls"].values())}, p.get("finish_reason"))
        for _, p in sorted(parts.items())
    ]


def _take(part: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", choice)
    for key in ("content", "reasoning_content", "text"):
        if delta.get(key):
            part[key] = part.get(key, "") + delta[key]
    for call in delta.get("tool_calls") or ():
        own = part["calls"].setdefault(call["index"], {"function": {"name": "", "arguments": ""}})
        for key in ("name", "arguments"):
            own["function"][key] += call["function"].get(key) or ""
    if choice.get("finish_reason"):
        part["finish_reason"] = choice["finish_reason"]


def _said(message: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    """What an answer says, without ids and times."""
    calls = message.get("tool_calls") or ()
    return {
        "content": message.get("content") or message.get("text") or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [(c["function"]["name"], c["function"]["arguments"]) for c in calls],
        "finish_reason": finish_reason,
    }


async def soak(url: str, requests: int, at_once: int, served: Served) -> Tally:
    """Send `requests` requests, `at_once` at a time."""
    tally, draw, known = Tally(), random.Random(2), asks(DISTINCT)
    start = time.monotonic()
    limits = httpx.Limits(max_connections=at_once + 8)
    queue = iter(range(requests))
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one() -> None:
            for _ in queue:
                kind = draw.random()
                ask = draw.choice(known)
                if kind < 0.05:
                    head = {"content-type": "application/json"}
                    body = draw.choice(MALFORMED)
                    reply = await client.post("/v1/chat/completions", content=body, headers=head)
                    tally.statuses[f"malformed {reply.status_code}"] += 1
                    continue
                if kind < 0.33:
                    # Early: an answer that is whole before its client leaves was not left.
                    leave = draw.randint(0, 3)
                    answer = await streamed(client, ask, tally, leave)
                elif kind < 0.7:
                    answer = await streamed(client, ask, tally, None)
                else:
                    answer = await whole(client, ask, tally)
                if answer is not None:
                    tally.answers.append((ask, answer))

        async def watch() -> None:
            while True:
                tally.memory.append((time.monotonic() - start, served.resident_bytes()))
                await asyncio.sleep(1)

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(one() for _ in range(at_once)))
        tally.memory.append((time.monotonic() - start, served.resident_bytes()))
        watcher.cancel()
    return tally


async def differing(url: str, answers: Sequence[tuple[Ask, Any]]) -> list[tuple[Ask, Any, Any]]:
    """(request, answer in company, answer alone) for each answer that differs."""
    alone: dict[int, Any] = {}
    wrong = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for ask, answer in answers:
            if ask.number not in alone:
                alone[ask.number] = await whole(client, ask, None)
            if alone[ask.number] != answer:
                wrong.append((ask, answer, alone[ask.number]))
    return wrong


def growth(memory: Sequence[tuple[float, int]]) -> float:
    """Memory in the last tenth of the time over memory after the first three tenths."""
    end = memory[-1][0]
    early = [size for second, size in memory if 0.3 * end <= second <= 0.4 * end]
    late = [size for second, size in memory if second >= 0.9 * end]
    return max(late) / max(early or [memory[0][1]])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--num-pages", type=int, default=384)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--growth", type=float, default=1.05, help="of memory that is still flat")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = ["--num-pages", str(args.num_pages), "--dtype", args.dtype]
    start = time.monotonic()
    with Served(args.model, *options) as served:
        tally = asyncio.run(soak(served.url, args.requests, args.at_once, served))
        seconds = time.monotonic() - start
        idle = served.idle_metrics()
        wrong = asyncio.run(differing(served.url, tally.answers))
    server_errors = sum(n for s, n in tally.statuses.items() if s.split()[-1] >= "500")
    accepted_bad = sum(
        n for s, n in tally.statuses.items() if s.startswith("malformed") and s < "malformed 4"
    )
    results = {
        "statuses": dict(sorted(tally.statuses.items())),
        "finished": len(tally.answers),
        "aborted": tally.aborted,
        "aborted share": round(tally.aborted / args.requests, 4),
        "pages held at the end": idle["winnow_pages_used"],
        "memory growth": round(growth(tally.memory), 4),
        "memory bytes": max(size for _, size in tally.memory),
        "answers that differ from the request alone": len(wrong),
        "seconds": round(seconds, 1),
    }
    for name, value in results.items():
        print(f"{name}: {value}")
    for ask, together, alone in wrong[:3]:
        print(json.dumps({"request": ask.body, "together": together, "alone": alone})[:2000])
    good = (
        server_errors == 0
        and accepted_bad == 0
        and idle["winnow_pages_used"] == 0
        and growth(tally.memory) <= args.growth
        and not wrong
        and len(tally.answers) > 0
        and tally.aborted >= ABORTED_SHARE * args.requests
    )
    print("all held" if good else "NOT all held")
    if args.out is not None:
        workload = {
            "model": args.model, "requests": args.requests, "distinct": DISTINCT,
            "aborted_share_at_least": ABORTED_SHARE, "malformed_share": 0.05,
            "max_tokens": MAX_TOKENS,
        }  # fmt: skip
        conditions = {
            "formats": {"kv": "model", "index": "model"},
            "parallel": {"plan": "tp1", "devices": 1}, "acceptance": {"kind": "none"},
            "cache_state": "prefix caching on, cold at the start", "latency_objective": {},
            "concurrency": args.at_once, "num_pages": args.num_pages,
            "results": results, "held": good,
        }  # fmt: skip
        record = Record(
            "serving", "soak", "s", (seconds,), workload, conditions,
            machine(os.cpu_count() or 1), software(), commit(),
        )  # fmt: skip
        append(args.out, [record])
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
