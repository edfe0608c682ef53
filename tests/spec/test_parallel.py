"""Which rank owns what: every plan tiles the model, and what does not divide is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest

from winnow.errors import UnsupportedError
from winnow.spec.formats import BF16, MXFP8
from winnow.spec.memory import weight_bytes
from winnow.spec.page import RowLayout
from winnow.spec.parallel import ParallelPlan
from winnow.spec.presets import preset

M3 = preset("minimax-m3")
PLANS = ("tp1", "tp4", "tp8", "tp4ep4", "tp8ep8", "tp8ep2", "dep4", "tp2dep4", "tp4dcp4", "tp8dcp2")


@pytest.mark.parametrize("word", PLANS)
def test_the_ranks_of_a_plan_own_everything_and_equally_often(word: str) -> None:
    plan = ParallelPlan.parse(word)
    assert str(plan) == word
    shares = [plan.share(M3, rank) for rank in range(plan.num_ranks)]
    wholes = {
        "heads": (M3.num_heads, plan.dp_size),
        "kv_heads": (M3.num_kv_heads, plan.dp_size * max(1, plan.tp_size // M3.num_kv_heads)),
        "vocabulary": (M3.vocab_size, plan.dp_size),
        "dense": (M3.dense_width, plan.dp_size),
        "shared": (M3.shared_width, plan.dp_size),
    }
    for name, (count, times) in wholes.items():
        owners = Counter(chain.from_iterable(getattr(share, name) for share in shares))
        assert owners == dict.fromkeys(range(count), times), name
    slices = Counter((e, c) for s in shares for e in s.experts for c in (s.expert_columns,))
    assert set(slices.values()) == {1}
    assert sum(len(columns) for _, columns in slices) == M3.num_experts * M3.expert_width


@pytest.mark.parametrize("word", PLANS)
def test_a_rank_owns_the_kv_heads_and_index_heads_that_its_queries_need(word: str) -> None:
    plan = ParallelPlan.parse(word)
    for rank in range(plan.num_ranks):
        share = plan.share(M3, rank)
        assert {head // M3.heads_per_kv_head for head in share.heads} == set(share.kv_heads)
        assert (
            len(share.kv_heads) == RowLayout.of(M3, BF16, BF16, tp_size=plan.tp_size).num_kv_heads
        )
        # Scanning by blocks, a rank scores all heads.
        assert share.index_heads == (share.kv_heads if plan.dcp_size == 1 else range(4))


def test_ranks_hold_a_whole_model_between_them_and_what_all_need_each() -> None:
    formats = (MXFP8, MXFP8, BF16)
    whole = weight_bytes(M3, *formats)
    for word in ("tp4", "tp4ep4", "tp2ep2"):
        plan = ParallelPlan.parse(word)
        ranks = [
            weight_bytes(M3, *formats, share=plan.share(M3, rank)) for rank in range(plan.num_ranks)
        ]
        for part in ("embedding", "head", "attention", "dense_mlp", "experts", "shared_experts"):
            assert sum(rank[part] for rank in ranks) == whole[part], part
        for part in ("router", "norms"):
            assert all(rank[part] == whole[part] for rank in ranks), part
        # Four heads and the key, which every rank has.
        assert ranks[0]["index"] * 5 == whole["index"] * (4 // plan.num_ranks + 1)


def test_data_parallel_groups_hold_all_but_the_experts() -> None:
    whole = weight_bytes(M3, MXFP8, MXFP8, BF16)
    share = ParallelPlan.parse("dep4").share(M3, 3)
    rank = weight_bytes(M3, MXFP8, MXFP8, BF16, share=share)
    assert share.experts == range(96, 128)
    assert rank == {**whole, "experts": whole["experts"] // 4}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("tp3", r"64 heads do not divide among 3 ranks: use tp with one of 1, 2, 4, 8, .* 64"),
        ("tp128", r"64 heads do not divide among 128 ranks"),
        ("dep3", r"128 experts do not divide among 3 ranks: use ep with one of 1, 2, 4"),
        ("dep256", r"128 experts do not divide among 256 ranks"),
        ("tp8ep3", r"8 ranks do not divide into 3 shares of the experts: .* 1, 2, 4, 8$"),
        ("tp4dcp3", r"4 tensor-parallel ranks do not divide among 3 .* 1, 2, 4$"),
        ("tp0", r"'tp0' is not understood: write tpN"),
        ("tp4tp8", r"'tp4tp8' is not understood"),
        ("ep4dep4", r"'ep4dep4' is not understood"),
        ("4", r"'4' is not understood"),
        ("tp4 ", r"'tp4 ' is not understood"),
        ("pp2", r"'pp2' is not understood"),
        ("tp" + "9" * 99, r"is not understood"),
        ("", r"'' is not understood"),
    ],
)
def test_an_impossible_plan_is_refused_with_what_is_possible(word: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ParallelPlan.parse(word).share(M3)


def test_ranks_that_cannot_hold_kv_heads_equally_often_are_refused() -> None:
    odd = replace(M3, num_heads=48, num_kv_heads=4)
    with pytest.raises(
        UnsupportedError, match=r"6 .* ranks cannot hold 4 KV heads .* multiple of 4"
    ):
        ParallelPlan(tp_size=6).share(odd)


def test_data_parallel_groups_that_do_not_share_experts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"4 data-parallel groups .* write dep4"):
        ParallelPlan(dp_size=4)


def test_neighbouring_ranks_divide_the_columns_of_the_same_experts() -> None:
    shares = [ParallelPlan.parse("tp8ep2").share(M3, rank) for rank in (0, 1, 4)]
    assert [share.experts for share in shares] == [range(64), range(64), range(64, 128)]
    assert [share.expert_columns.start for share in shares] == [0, 768, 0]


def test_a_share_that_cuts_a_group_of_a_format_is_refused() -> None:
    share = ParallelPlan.parse("tp64").share(M3)
    with pytest.raises(UnsupportedError, match=r"48 columns do not fill mxfp8 groups of 32"):
        weight_bytes(M3, MXFP8, MXFP8, BF16, share=share)


def test_a_model_without_experts_or_dense_layers_divides_by_what_it_has() -> None:
    dense = replace(M3.with_layers(1), layer_is_moe=(False,), num_experts=0, shared_width=7)
    assert len(ParallelPlan(tp_size=4).share(dense).dense) == 3072
    sparse = replace(M3.with_layers(1), dense_width=7)
    assert len(ParallelPlan(tp_size=4).share(sparse).dense) == 0
