"""What benchmarks/gpu_same_choices.py computes of another engine's answers, and what it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from winnow.config import SamplingParams
from winnow.engine.llm import LLM
from winnow.model.checkpoint import make_tiny

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROMPTS = [[7, 8, 9], list(range(140)), [i * i % 251 for i in range(700)]]
"""The last is of more blocks than its rows can take."""
PROGRAMS = ("notes", "forced", "agreement", "same_choices")
COLUMNS, TOKENS = 64, 3
PARAMS = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
BLOCKS, EXPERTS = 0, 1
"""The first choices of a row."""


@pytest.fixture(scope="module")
def programs() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return {name: import_module(f"gpu_{name}") for name in PROGRAMS}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    place = tmp_path_factory.mktemp("same") / "tiny"
    make_tiny(place)

    def opened(dtype: str, state: str = "model") -> LLM:
        return LLM(
            str(place), progress=False, dtype=dtype, num_pages=32, max_step_tokens=256,
            kv_format=state, index_format=state,
        )  # fmt: skip

    return opened


def forced(programs: Any, llm: LLM, prompts: Any, noted: Any, stored: Any = None) -> Any:
    asked = zip(prompts, noted, stored or [None] * len(noted), strict=True)
    return programs["forced"].forced(
        llm, [programs["forced"].Asked(*one) for one in asked], COLUMNS
    )


@pytest.fixture(scope="module")
def noted(programs: Any, engine: Callable[..., LLM]) -> Any:
    return programs["notes"].noted_answers(engine("float32"), PROMPTS, PARAMS, COLUMNS)


@pytest.fixture(scope="module")
def computed(programs: Any, engine: Callable[..., LLM], noted: Any) -> Any:
    return forced(programs, engine("float32"), PROMPTS, noted)


def test_an_engine_that_is_given_its_own_choices_computes_its_own_logits_to_the_bit(
    noted: Any, computed: Any
) -> None:
    for own, again in zip(noted, computed, strict=True):
        assert torch.equal(again.columns, own.columns)
        assert torch.equal(again.behind, torch.zeros(TOKENS))
        assert torch.equal(again.gaps, own.leads)
    assert bool(noted[2].leads[:, BLOCKS].isfinite().any()), "blocks were chosen"


@pytest.mark.parametrize("depth", [BLOCKS, EXPERTS])
def test_another_choice_is_taken_and_seen_to_be_no_near_tie(
    programs: Any, engine: Callable[..., LLM], noted: Any, computed: Any, depth: int
) -> None:
    prompt, one = PROMPTS[2], noted[2]
    row = len(prompt)
    choices = one.choices.clone()
    topk = 4
    own = choices[row, depth].tolist()
    # The first one left takes the place of the first one taken, in every head.
    for start in range(0, len(own) if depth == BLOCKS else topk, topk):
        taken = own[start : start + topk]
        if taken[0] < 0 or len(taken) < topk:
            continue
        other = next(i for i in range(len(taken) + 1) if i not in taken)
        choices[row, depth, start : start + topk] = torch.tensor(
            sorted([other, *taken[1:]]), dtype=torch.int16
        )
    again = forced(programs, engine("float32"), [prompt], [replace(one, choices=choices)])[0]
    assert float(again.gaps[row, depth]) < 0
    assert torch.equal(again.columns[0], one.columns[0]), "the rows before it are as they were"
    assert not torch.equal(again.columns[1], one.columns[1])


def test_what_was_stored_is_read_and_compared_with_what_would_have_been(
    programs: Any, engine: Callable[..., LLM]
) -> None:
    llm = engine("float32", "nvfp4")
    pages = programs["notes"].StoredPages(llm)
    noted = programs["notes"].noted_answers(llm, PROMPTS, PARAMS, COLUMNS)
    stored = [pages.of(f"offline-{number}") for number in range(len(PROMPTS))]
    same = forced(programs, engine("float32", "nvfp4"), PROMPTS, noted, stored)
    layout, layers = llm.engine.runner.storage.layout, llm.engine.spec.num_layers
    for own, again in zip(noted, same, strict=True):
        assert torch.equal(again.columns, own.columns)
        assert again.stored.shape[1] == 2 * layers + len(layout.sparse_layers)
        assert float(again.stored.abs().max()) == 0.0
    part = layout.value(1, 0)
    other = [one.clone() for one in stored]
    # A bit of each code of one head's V of the first token, in the second layer.
    other[0][0, part.codes : part.codes + part.format.code_bytes(part.dim)] ^= 0x11
    seen = forced(programs, engine("float32", "nvfp4"), PROMPTS, noted, other)
    differ = (seen[0].stored != 0).nonzero().tolist()
    assert differ[0] == [0, 3], "K and V of the first layer, K, then V of the second"
    assert all(part > 3 for row, part in differ if row > 0), "later layers follow from it"
    assert not torch.equal(seen[0].columns[0], noted[0].columns[0])
    assert torch.equal(seen[1].columns, noted[1].columns), "other requests are as they were"


def test_blocks_that_are_no_selection_are_infinitely_far_behind(programs: Any) -> None:
    current = torch.tensor([1, 1, 1, 1, 5]).view(-1, 1, 1)
    ids = torch.tensor([[0, 1, -1], [0, -1, -1], [1, 1, -1], [0, 1, 2], [1, 3, 5]]).unsqueeze(1)
    assert programs["forced"]._is_selection(ids, current).tolist() == [True, *[False] * 3, True]
    ids[4, 0] = torch.tensor([1, 3, 4])
    assert not bool(programs["forced"]._is_selection(ids, current)[4])


def _sides(programs: Any) -> tuple[Any, Any, Any]:
    """A noted answer of two tokens, and the same as computed in bf16 and in fp32."""
    best = torch.arange(16.0, 0.0, -1.0).repeat(2, 1)
    noted = programs["notes"].Noted(
        length=torch.tensor(3),
        tokens=torch.tensor([0, 0]),
        rms=torch.full((2,), 2.0),
        best=best,
        ids=torch.arange(16).repeat(2, 1),
        columns=torch.ones(2, 100),
        choices=torch.zeros(4, 2, 2, dtype=torch.int16),
        leads=torch.full((4, 2), 0.5),
    )
    narrow = programs["forced"].Forced(
        behind=torch.zeros(2),
        lead=torch.full((2,), 0.5),
        columns=torch.full((2, 100), 1.01),
        gaps=torch.full((4, 2), 0.5),
        stored=torch.full((4, 3), 0.1),
    )
    wide = replace(narrow, columns=torch.full((2, 100), 1.005))
    return noted, narrow, wide


def test_every_row_token_and_choice_must_be_within_its_bound(
    programs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    agreement = programs["agreement"]
    noted, narrow, wide = _sides(programs)
    bounds = agreement.Bounds(0.02, 0.05, 0.01, 0.02, stored=0.2, stored_median=0.095)

    def holds(noted: Any = noted, narrow: Any = narrow, wide: Any = wide) -> bool:
        found = agreement.Agreement([noted], [narrow]).report("this", bounds, [wide], 6)
        assert capsys.readouterr().out.count("FAILED" if not found else "ok: ") == 1
        return bool(found)

    def narrow_with(name: str, place: Any, value: float) -> Any:
        values = getattr(narrow, name).clone()
        values[place] = value
        return replace(narrow, **{name: values})

    assert holds()
    for name, place, near, far in (
        ("behind", 1, 0.049, 0.051),
        ("gaps", (3, BLOCKS), -0.019, -0.021),
        ("gaps", (3, EXPERTS), -0.009, -0.011),
        ("columns", 1, 1.019, 1.021),
        ("stored", (2, 1), 0.19, 0.21),
    ):
        assert holds(narrow=narrow_with(name, place, near)), name
        assert not holds(narrow=narrow_with(name, place, far)), name
        assert not holds(narrow=narrow_with(name, place, float("nan"))), name
    assert holds(wide=replace(wide, columns=torch.full((2, 100), 1.0052)))
    assert not holds(wide=replace(wide, columns=torch.full((2, 100), 1.0053)))
    assert not holds(wide=replace(wide, stored=wide.stored * 1.05))
    assert not holds(noted=replace(noted, tokens=torch.tensor([0, 1])))


def test_every_case_has_bounds_and_choices_have_some_where_there_are_any(programs: Any) -> None:
    same = programs["same_choices"]
    assert {case.name for case in same.CASES} == set(same.BOUNDS)
    for case in same.CASES:
        bounds = same.BOUNDS[case.name]
        chosen = case.model != "tiny-whole"
        assert (bounds.experts > 0, bounds.blocks > 0) == (chosen, chosen)
        assert (bounds.stored > 0, bounds.stored_median > 0) == (case.given, case.given)


def test_bounds_are_the_most_that_anything_moved_times_the_square_root_of_two(
    programs: Any,
) -> None:
    noted, narrow, _ = _sides(programs)
    gaps = narrow.gaps.clone()
    gaps[1, BLOCKS], gaps[2, EXPERTS], gaps[3] = 0.1, -0.2, float("inf")
    leads = noted.leads.clone()
    leads[3] = float("inf")
    found = programs["agreement"].Agreement(
        [replace(noted, leads=leads)],
        [replace(narrow, gaps=gaps, lead=torch.tensor([0.5, 0.25]))],
    )
    expected = [2**0.5 * value for value in (0.01 / 1.01, 0.25, 0.7, 0.4, 0.1)]
    assert list(vars(found.bounds()).values()) == pytest.approx([*expected, 0.1], rel=1e-4)


def test_how_far_a_block_is_behind_hangs_on_all_scores_of_its_head(programs: Any) -> None:
    """0.97 and 0.82 are as near to each other beside 68 as 30.97 and 30.82 are; blocks beyond a
    row's own, and other heads, count for nothing."""
    low = torch.tensor([[68.0, 54.0, 38.0, 0.97, 0.82, -1.4, -math.inf]])
    high = low + torch.tensor([[0.0, 0.0, 0.0, 30.0, 30.0, 30.0, 0.0]])
    size = programs["notes"].score_size(torch.stack([low, high], 1).double())
    assert size.shape == (1, 2)
    assert torch.allclose(size[0, 0], low[0, :6].double().square().mean().sqrt())
    behind = 0.15 / size[0]
    assert bool((behind < 0.01).all())
    assert float(behind.max() / behind.min()) < 1.3
    none = programs["notes"].score_size(torch.zeros(1, 1, 3, dtype=torch.float64))
    assert bool((0.0 / none == 0).all())
