"""Sessions of a coding agent as traces of block hashes, made up from a documented distribution.

Owns the distribution. Knows nothing of servers; AIPerf turns the hashes into text of exactly these
lengths with exactly these shared prefixes (`--custom-dataset-type weka_trace`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

HASH_BLOCK_TOKENS = 64
"""Tokens for which one hash stands, as in the field's recorded traces."""


@dataclass(frozen=True)
class AgentDistribution:
    """What a session looks like.

    A session starts with the definitions of its tools, a system prompt and a task. Each turn adds
    the model's answer and a tool's result to the context; between turns a tool runs. Some turns
    start sub-agents, each with a context and a system prompt of its own; the session waits for
    them. Lengths of task, result and answer are log-normal (`median`, and `spread`, the standard
    deviation of the logarithm), the number of turns is geometric with a least value, pauses are
    exponential. A session ends early before its context would exceed `max_context`.
    """

    tool_tokens: int = 256
    system_tokens: int = 128
    task_median: float = 96.0
    result_median: float = 256.0
    answer_median: float = 32.0
    spread: float = 0.6
    min_turns: int = 3
    mean_turns: float = 8.0
    pause_mean_s: float = 0.4
    subagent_share: float = 0.15
    subagents_max: int = 2
    subagent_turns: int = 2
    max_context: int = 6144


@dataclass
class _Context:
    """A growing conversation: its length, and a hash for each of its full blocks."""

    fresh: Iterator[int]
    tokens: int = 0
    hashes: list[int] = field(default_factory=list)

    def grow(self, tokens: int) -> None:
        self.tokens += tokens
        while len(self.hashes) < self.tokens // HASH_BLOCK_TOKENS:
            self.hashes.append(next(self.fresh))


def sessions(number: int, seed: int, d: AgentDistribution | None = None) -> list[dict[str, Any]]:
    """`number` sessions, the same for the same seed, each an object of the trace format.

    Times are in seconds from the session's start, of a client for which answers take no time:
    `think_time` is the pause before a request, which is what a closed loop replays.
    """
    distribution = d or AgentDistribution()
    return [_session(f"agent-{i:03}", Random(f"{seed}-{i}"), distribution) for i in range(number)]


def _session(name: str, rng: Random, d: AgentDistribution) -> dict[str, Any]:
    fresh = count()
    context = _Context(fresh)
    context.grow(d.tool_tokens + d.system_tokens + _length(rng, d.task_median, d))
    requests: list[dict[str, Any]] = []
    clock = 0.0
    for turn in range(_turns(rng, d)):
        answer = _length(rng, d.answer_median, d)
        if context.tokens + answer > d.max_context:
            break
        pause = rng.expovariate(1 / d.pause_mean_s) if turn else 0.0
        clock += pause
        requests.append(_request(context, answer, clock, pause))
        context.grow(answer)
        if rng.random() < d.subagent_share:
            for agent in range(rng.randint(1, d.subagents_max)):
                requests.append(_subagent(f"{name}-{turn}-{agent}", clock, fresh, rng, d))
        context.grow(_length(rng, d.result_median, d))
    return {
        "id": name,
        "models": ["agent"],
        "block_size": HASH_BLOCK_TOKENS,
        "hash_id_scope": "local",
        "tool_tokens": d.tool_tokens,
        "system_tokens": d.system_tokens,
        "requests": requests,
    }


def _subagent(
    name: str, start: float, fresh: Iterator[int], rng: Random, d: AgentDistribution
) -> dict[str, Any]:
    context = _Context(fresh)
    context.grow(d.system_tokens + _length(rng, d.task_median, d))
    requests: list[dict[str, Any]] = []
    clock = start
    for turn in range(d.subagent_turns):
        answer = _length(rng, d.answer_median, d)
        pause = rng.expovariate(1 / d.pause_mean_s) if turn else 0.0
        clock += pause
        requests.append(_request(context, answer, clock, pause))
        context.grow(answer + _length(rng, d.result_median, d))
    return {
        "t": round(start, 3),
        "type": "subagent",
        "agent_id": name,
        "subagent_type": "explore",
        "duration_ms": round((clock - start) * 1e3),
        "total_tokens": sum(r["in"] + r["out"] for r in requests),
        "tool_use_count": len(requests),
        "status": "completed",
        "requests": requests,
        "models": ["agent"],
        "system_tokens": d.system_tokens,
    }


def _request(context: _Context, answer: int, clock: float, pause: float) -> dict[str, Any]:
    return {
        "t": round(clock, 3),
        "type": "s",
        "model": "agent",
        "in": context.tokens,
        "out": answer,
        "hash_ids": list(context.hashes),
        "think_time": round(pause, 3),
    }


def _turns(rng: Random, d: AgentDistribution) -> int:
    """Geometric from `min_turns` on, with mean `mean_turns`."""
    goes_on = 1 - 1 / (d.mean_turns - d.min_turns + 1)
    turns = d.min_turns
    while rng.random() < goes_on:
        turns += 1
    return turns


def _length(rng: Random, median: float, d: AgentDistribution) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), d.spread)))
