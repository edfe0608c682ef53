"""Captured steps, with a stand-in for the device's graphs: padding, buffers, the choice of shapes
and steps begun on a guess change no token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import driving

from winnow.config import SamplingParams
from winnow.core.plan import PlannedRows, StepPlan
from winnow.core.request import Request
from winnow.engine import ahead
from winnow.engine.engine import Engine
from winnow.engine.graphs import StepGraphs, sampling_mode
from winnow.engine.runner import Runner
from winnow.engine.shapes import StepShape, batch_sizes, fitting, table_widths
from winnow.ops.sample import SampleRow

VOCAB = 256


class Recorded:
    """Keeps each work and calls it again at every replay: reads what lies in its buffers then."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        number = len(self.replays)
        self.replays.append(0)

        def replay() -> None:
            self.replays[number] += 1
            work()

        return replay


def with_graphs(directory: Path, **options: Any) -> tuple[Engine, Recorded]:
    engine = driving.engine(directory, dtype="float32", **options)
    recorded = Recorded()
    old = engine.runner
    graphs = StepGraphs(old.model, old.storage, recorded, engine.scheduler.max_running, 64)
    engine.runner = Runner(old.model, old.storage, graphs)
    return engine, recorded


def serve(
    engine: Engine, requests: dict[str, tuple[list[int], SamplingParams]], seed: int | None = None
) -> dict[str, list[int]]:
    """Tokens of requests that arrive at once, or with `seed` at random moments, some to leave."""
    rng = random.Random(seed)
    tokens: dict[str, list[int]] = {}
    left = list(requests.items())
    while left or engine.has_work:
        while left and (seed is None or not engine.has_work or rng.random() < 0.2):
            name, request = left.pop(0)
            engine.add(name, *request)
            tokens[name] = []
        if seed is not None and rng.random() < 0.02 and tokens:
            engine.abort(rng.choice(sorted(tokens)))
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
        engine.scheduler.check_invariants()
    return tokens


def params(i: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 20, "top_p": 0.9},
        {"min_p": 0.02},
        {"presence_penalty": 0.5},
        {"min_tokens": 9, "ignore_eos": False},
    ]
    options = {"ignore_eos": True, "seed": i, **kinds[i % len(kinds)]}
    return SamplingParams(max_tokens=12 + 7 * (i % 4), **options)


LENGTHS = (5, 127, 128, 129, 700, 1500, 640, 250, 20, 33, 384, 1)
REQUESTS = {f"r{i}": (driving.prompt_of(n, VOCAB, i), params(i)) for i, n in enumerate(LENGTHS)}


@pytest.fixture(scope="module")
def eager(tiny: Path) -> dict[str, list[int]]:
    return serve(driving.engine(tiny, dtype="float32", max_step_tokens=300), REQUESTS)


def test_replayed_steps_give_the_tokens_of_steps_computed_as_they_are(
    tiny: Path, eager: dict[str, list[int]]
) -> None:
    engine, recorded = with_graphs(tiny, max_step_tokens=300)
    assert serve(engine, REQUESTS) == eager
    assert sum(recorded.replays) > 20


@pytest.mark.parametrize("seed", range(6))
def test_arrivals_and_departures_while_a_step_is_begun_change_no_token(
    tiny: Path, eager: dict[str, list[int]], seed: int
) -> None:
    engine, _ = with_graphs(tiny, max_step_tokens=150, max_running=5, num_pages=40)
    tokens = serve(engine, REQUESTS, seed)
    assert all(own == eager[name][: len(own)] for name, own in tokens.items())
    assert sum(tokens[name] == eager[name] for name in tokens) >= len(tokens) // 2
    assert engine.runner.guesses > engine.runner.wasted
    assert engine.stats().pages_used == 0


def test_what_was_captured_short_is_replayed_long_and_in_other_slots(tiny: Path) -> None:
    """The same shapes serve requests of other lengths, pages and order."""
    engine, recorded = with_graphs(tiny)
    few = {name: REQUESTS[name] for name in ("r0", "r8")}
    alone = {name: serve(driving.engine(tiny, dtype="float32"), {name: REQUESTS[name]})[name]
             for name in ("r0", "r8", "r3", "r5")}  # fmt: skip
    assert serve(engine, few) == {name: alone[name] for name in few}
    captured = len(recorded.replays)
    again = {name: REQUESTS[name] for name in ("r8", "r3", "r5", "r0")}
    assert serve(engine, again) == {name: alone[name] for name in again}
    assert serve(engine, few) == {name: alone[name] for name in few}
    assert len(recorded.replays) < captured + 8


def test_a_request_that_fails_ends_alone_while_its_next_step_is_under_way(tiny: Path) -> None:
    engine, _ = with_graphs(tiny)
    good = serve(engine, {"r0": REQUESTS["r0"]})["r0"]
    graphs = engine.runner.graphs
    assert graphs is not None
    engine.add("bad", REQUESTS["r6"][0], params(0))
    engine.add("r0", *REQUESTS["r0"])
    tokens: list[int] = []
    errors = []
    for step in range(60):
        if step == 5:
            (slots,) = [t._slots for t in graphs.buffers._tables.values() if t._slots[0].request]
            place = [
                slot.request is not None and slot.request.request_id == "bad" for slot in slots
            ]
            request = slots[place.index(True)].request
            assert request is not None
            # Its own last page, which nobody shares.
            engine.runner.storage.rows[request.pages[-1]] = 0xFF
        for output in engine.step():
            errors += [output] if output.error is not None else []
            tokens += output.token_ids if output.request_id == "r0" else ()
    assert [error.request_id for error in errors] == ["bad"]
    assert tokens == good


def test_a_plan_with_a_chunk_of_a_prompt_or_too_many_requests_has_no_shape(tiny: Path) -> None:
    engine, _ = with_graphs(tiny, max_running=6)
    graphs = engine.runner.graphs
    assert graphs is not None

    def plan(*counts: int, pages: int = 1) -> StepPlan:
        each = (PlannedRows(str(i), 0, n, (1,) * pages, n > 0) for i, n in enumerate(counts))
        return StepPlan(tuple(each))

    assert graphs.shape(plan(1, 1, 1)) == StepShape(3, 1, 16)
    assert graphs.shape(plan(1, pages=17)) == StepShape(1, 1, 32)
    assert graphs.shape(plan(*[1] * 6, pages=64)) == StepShape(6, 1, 64)
    assert graphs.shape(plan(1, 2)) is None
    assert graphs.shape(plan(*[1] * 7)) is None
    assert graphs.shape(plan(1, pages=65)) is None
    assert graphs.shape(StepPlan()) is None
    assert graphs.fitting(1, 5, 1) == StepShape(1, 5, 16)
    assert graphs.fitting(2, 4, 1) is None


def test_steps_of_several_rows_a_request_give_the_logits_of_each(tiny: Path) -> None:
    """What verifying a draft needs: four rows of each of two requests, padded to more."""
    engine, _ = with_graphs(tiny, max_running=32, prefix_caching=False)
    graphs, storage = engine.runner.graphs, engine.runner.storage
    assert graphs is not None
    prompts = [driving.prompt_of(n, VOCAB) for n in (200, 131)]
    want = [driving.all_logits(engine, prompt, f"w{i}")[0][-4:] for i, prompt in enumerate(prompts)]
    storage.rows.fill_(0xFF)
    requests = {f"v{i}": Request(f"v{i}", tuple(p), 1) for i, p in enumerate(prompts)}
    pages = {"v0": (3, 9), "v1": (4, 8)}

    def plan(start: int, end: int) -> StepPlan:
        rows = [
            PlannedRows(name, max(0, len(r.prompt) + start), 0, pages[name], True)
            for name, r in requests.items()
        ]
        counts = [
            len(r.prompt) + end - row.start for row, r in zip(rows, requests.values(), strict=True)
        ]
        return StepPlan(tuple(
            PlannedRows(row.request_id, row.start, n, row.pages, True)
            for row, n in zip(rows, counts, strict=True)
        ))  # fmt: skip

    engine.runner.logits(engine.runner.inputs(plan(-(10**6), -4), requests))
    shape = graphs.fitting(3, 4, 2)
    assert shape is not None
    graphs.fill(shape, plan(-4, 0), requests)
    graphs.forward(shape)
    assert torch.equal(graphs.logits[:8], torch.cat(want))


def test_padded_sizes_and_widths_hold_all_that_may_come_and_no_more() -> None:
    for most in (1, 5, 8, 64, 100, 256, 512):
        sizes = batch_sizes(most)
        assert sizes[-1] == most
        assert list(sizes) == sorted(set(sizes))
        assert all(fitting(sizes, n) is not None for n in range(1, most + 1))
        assert fitting(sizes, most + 1) is None
    assert batch_sizes(10**6)[-1] == 512
    assert table_widths(3) == (3,)
    assert table_widths(4096) == (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    assert table_widths(40) == (16, 32, 40)


def test_a_guess_is_the_same_rows_a_token_further_and_none_where_one_may_not_be() -> None:
    request = Request("a", prompt=(1,) * 126, max_tokens=4)
    row = PlannedRows("a", 125, 1, (7,), True)

    def guess(row: PlannedRows) -> StepPlan | None:
        return ahead.next_plan(StepPlan((row,)), {"a": request})

    expected = StepPlan((PlannedRows("a", 126, 1, (7,), True),))
    assert guess(row) == expected
    assert guess(PlannedRows("a", 127, 1, (7,), True)) is None, "the next needs a page"
    assert guess(PlannedRows("a", 120, 6, (7,), True)) is None, "a chunk of a prompt"
    request.output += [1, 2, 3]
    assert guess(row) is None, "the last token"
    assert ahead.covers(expected, expected)
    assert not ahead.covers(expected, StepPlan())
    assert not ahead.covers(expected, StepPlan((row,)))


def test_how_rows_are_sampled_follows_the_most_that_any_asks_for() -> None:
    def rows(*options: dict[str, Any]) -> list[SampleRow]:
        return [SampleRow(seed=0, index=0, **own) for own in options]

    cold: dict[str, Any] = {"temperature": 0.0, "top_k": 5}
    assert sampling_mode(rows(cold, cold)) == "greedy"
    assert sampling_mode(rows(cold, {"min_p": 0.1})) == "drawn"
    assert sampling_mode(rows({}, {"top_p": 0.5})) == "ranked"
    assert sampling_mode(rows(cold, {"banned": (3,)})) is None
    assert sampling_mode(rows({"logprobs": 0})) is None
