"""The named workloads and the agent sessions that one of them replays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from winnow.bench.agent_trace import HASH_BLOCK_TOKENS, AgentDistribution, sessions
from winnow.bench.workloads import workload, workloads, write_trace
from winnow.errors import RequestError

SHIPPED_SESSIONS, SHIPPED_SEED = 24, 1


def contexts(session: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The requests of each conversation of a session: its own, then those of its sub-agents."""
    yield [r for r in session["requests"] if r["type"] != "subagent"]
    yield from (r["requests"] for r in session["requests"] if r["type"] == "subagent")


def every_request(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for session in found for requests in contexts(session) for r in requests]


def test_the_shipped_trace_is_what_the_generator_makes() -> None:
    shipped = files("winnow.bench.workloads").joinpath("agents-small.json").read_text("utf-8")
    assert json.loads(shipped) == sessions(SHIPPED_SESSIONS, SHIPPED_SEED)


def test_a_turn_repeats_all_full_blocks_of_the_turns_before_it() -> None:
    for session in sessions(30, seed=2):
        for requests in contexts(session):
            for before, after in pairwise(requests):
                known = before["hash_ids"]
                assert after["hash_ids"][: len(known)] == known
                assert after["in"] > before["in"] + before["out"]


def test_hashes_are_those_of_the_full_blocks_and_no_other_context_s() -> None:
    for session in sessions(30, seed=3):
        owners: dict[int, int] = {}
        for place, requests in enumerate(contexts(session)):
            for request in requests:
                assert len(request["hash_ids"]) == request["in"] // HASH_BLOCK_TOKENS
                assert all(owners.setdefault(h, place) == place for h in request["hash_ids"])


def test_lengths_and_turns_follow_the_distribution() -> None:
    d = AgentDistribution(max_context=10**9)
    found = sessions(400, seed=4, d=d)
    answers = [r["out"] for r in every_request(found)]
    assert median(answers) == pytest.approx(d.answer_median, rel=0.1)
    turns = [len(next(contexts(session))) for session in found]
    assert sum(turns) / len(turns) == pytest.approx(d.mean_turns, rel=0.1)
    assert min(turns) == d.min_turns
    first = [next(contexts(session))[0]["in"] for session in found]
    assert median(first) == pytest.approx(d.tool_tokens + d.system_tokens + d.task_median, rel=0.05)


def test_no_context_outgrows_its_limit() -> None:
    d = replace(AgentDistribution(), max_context=1200)
    found = [next(contexts(session)) for session in sessions(100, seed=5, d=d)]
    assert max(r["in"] + r["out"] for requests in found for r in requests) <= 1200


def test_the_shipped_trace_goes_beyond_what_a_selection_holds_whole() -> None:
    lengths = [r["in"] for r in every_request(sessions(SHIPPED_SESSIONS, SHIPPED_SEED))]
    assert sum(n > 2048 + 128 for n in lengths) > 10


def test_every_workload_says_what_it_is_and_counts_requests_or_sessions() -> None:
    for chosen in workloads().values():
        assert len(chosen.about) > 20
        assert chosen.count in ("requests", "sessions")
    with pytest.raises(RequestError, match="known: fixed-256-64"):
        workload("none")


def test_a_record_s_workload_is_the_same_at_every_load_of_a_sweep() -> None:
    chosen = workload("fixed-256-64")
    assert chosen.described(None, 1, False)["requests_per_user"] == chosen.per_user
    assert chosen.described(40, 1, False)["requests"] == 40
    assert "requests_per_user" not in chosen.described(40, 1, True)


def test_a_trace_is_written_one_session_a_file(tmp_path: Path) -> None:
    written = sorted(write_trace(workload("agents-small"), tmp_path / "trace").glob("*.json"))
    assert len(written) == SHIPPED_SESSIONS
    assert json.loads(written[3].read_text())["id"] == written[3].stem
