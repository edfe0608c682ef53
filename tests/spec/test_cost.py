"""Costs of a step by part: against numbers worked by hand, and against the costs of the ops."""

from __future__ import annotations

from itertools import combinations

import pytest

from winnow.ops.case_data import Tokens, small_spec
from winnow.ops.dense_attention import cases as dense_cases
from winnow.ops.linear import cases as linear_cases
from winnow.ops.mlp import cases as mlp_cases
from winnow.ops.moe import cases as moe_cases
from winnow.ops.norm import cases as norm_cases
from winnow.ops.select_blocks import cases as select_cases
from winnow.ops.sparse_attention import cases as sparse_cases
from winnow.spec.cost import (
    STEP_PARTS,
    PartCost,
    StepShape,
    Storage,
    decode,
    distinct_experts,
    selected_tokens,
    step_costs,
    visible_tokens,
)
from winnow.spec.formats import BF16, FP8, FP32, MXFP8, NVFP4
from winnow.spec.model import BLOCK_TOKENS, ModelSpec
from winnow.spec.parallel import ParallelPlan
from winnow.spec.presets import preset

M3, FLASH = preset("minimax-m3"), preset("minimax-m3.1-flash")
FOUR_BIT = Storage(experts=NVFP4, linear=MXFP8, plain=BF16, kv=NVFP4, index=NVFP4)
EIGHT_BIT = Storage(experts=MXFP8, linear=MXFP8, plain=BF16, kv=FP8, index=FP8)
ALL_FP32 = Storage(experts=FP32, linear=FP32, plain=FP32, kv=FP32, index=FP32)
ONE = ParallelPlan()


def test_a_decode_step_of_64_long_requests_costs_what_it_does_by_hand() -> None:
    """M3.1-Flash in four bits on one GPU, 131,072 tokens: each request scans 72 bytes a token and
    layer, and reads K and V (72 bytes each) of 16 blocks for each of 4 heads."""
    costs = step_costs(FLASH, FOUR_BIT, ONE, decode(64, 131_072))
    assert tuple(costs) == STEP_PARTS
    assert costs["index_scan"] == PartCost(36_238_786_560, 515_396_075_520)
    assert costs["index_scan"].num_bytes == 60 * 64 * 131_072 * 72
    assert costs["index_scan"].num_flops == 60 * 64 * 131_072 * 2 * 4 * 128
    assert costs["sparse_attention"].num_bytes == 60 * 64 * 4 * 2048 * 144
    assert costs["sparse_attention"].num_flops == 60 * 64 * 64 * 2048 * 4 * 128
    assert costs["dense_attention"] == PartCost()
    # MXFP8 is 33 bits in 32; q, k, v and out, then the index; each row writes 38,880 bytes.
    projections = 60 * 6144 * (72 + 64 + 5) * 128
    assert costs["projections"].num_bytes == projections * 33 / 32 + 64 * 38_880
    assert costs["projections"].num_flops == 2 * 64 * projections
    assert costs["dense_mlp"].num_flops == 2 * 64 * 3 * 3 * 6144 * 12_288
    assert costs["experts"].num_flops == 2 * 64 * 4 * 57 * 3 * 6144 * 3072
    assert costs["shared_experts"].num_flops == costs["experts"].num_flops / 4
    assert costs["router"].num_flops == 2 * 64 * 57 * 6144 * 128
    # The head whole, and 64 rows of the embedding.
    assert costs["head"] == PartCost(2 * (200_064 + 64) * 6144, 2 * 64 * 200_064 * 6144)
    assert costs["norms"].num_flops == 4 * 64 * 121 * 6144
    assert costs["collectives"] == PartCost()
    # 128 (1 - (31/32)^64) = 111.22 of 128 experts are read.
    assert costs["experts"].num_bytes == pytest.approx(111.22 / 128 * 232_739_831_808, rel=1e-4)


def test_a_model_with_full_attention_layers_reads_all_of_their_context() -> None:
    costs = step_costs(M3, EIGHT_BIT, ONE, decode(8, 100_000))
    assert costs["dense_attention"].num_bytes == 3 * 8 * 100_000 * 1024
    assert costs["dense_attention"].num_flops == 3 * 8 * 100_000 * 64 * 4 * 128
    assert costs["index_scan"].num_bytes == 57 * 8 * 100_000 * 128


@pytest.mark.parametrize("topk", [1, 4, 16])
@pytest.mark.parametrize("kv_len", [1, 127, 128, 129, 511, 512, 513, 2048, 2049, 5000])
def test_tokens_seen_and_selected_are_those_counted_row_by_row(topk: int, kv_len: int) -> None:
    for rows in {1, min(kv_len, 8), kv_len}:
        seen = [kv_len - rows + i + 1 for i in range(rows)]
        blocks = [range(-(-n // BLOCK_TOKENS)) for n in seen]
        # The current block is partial, the other selected ones are whole.
        selected = [
            (min(len(b), topk) - 1) * BLOCK_TOKENS + n - b[-1] * BLOCK_TOKENS
            for n, b in zip(seen, blocks, strict=True)
        ]
        assert visible_tokens(rows, kv_len) == sum(seen)
        assert selected_tokens(rows, kv_len, topk) == sum(selected)


def test_chunks_of_a_prompt_do_the_operations_of_the_prompt_at_once() -> None:
    whole = step_costs(M3, EIGHT_BIT, ONE, StepShape(1, 3000, 3000, 0))
    chunks = [
        step_costs(M3, EIGHT_BIT, ONE, StepShape(1, end - start, end, 0))
        for start, end in ((0, 128), (128, 1000), (1000, 3000))
    ]
    for part in STEP_PARTS:
        total = sum((chunk[part] for chunk in chunks), PartCost())
        assert total.num_flops == whole[part].num_flops, part
        assert total.num_bytes >= whole[part].num_bytes, part


def test_rows_of_one_request_read_what_they_share_once() -> None:
    few = step_costs(FLASH, FOUR_BIT, ONE, StepShape(2, 8, 300, 16))
    assert few["sparse_attention"].num_bytes == 60 * 2 * 300 * 4 * 144
    assert few["index_scan"].num_bytes == 60 * 2 * 300 * 72
    # Rows that see little of a long context read at most what each selects.
    many = step_costs(FLASH, FOUR_BIT, ONE, StepShape(1, 2, 100_096, 2))
    assert many["sparse_attention"].num_bytes == 60 * (2048 + 2047) * 4 * 144


def test_experts_touched_are_k_for_one_token_and_all_for_many() -> None:
    assert distinct_experts(FLASH, 0) == 0
    assert distinct_experts(FLASH, 1) == pytest.approx(4)
    assert distinct_experts(FLASH, 2) == pytest.approx(8 - 16 / 128)
    assert distinct_experts(FLASH, 32) == pytest.approx(81.66, abs=0.01)
    assert distinct_experts(FLASH, 10_000) == pytest.approx(128)


def test_a_tensor_parallel_rank_sends_what_rings_send() -> None:
    """8 rows of 12,288 bytes: 3/4 of 98,304, twice for the embedding and two sums a layer; then
    3/4 of 8 rows of logits."""
    costs = step_costs(FLASH, FOUR_BIT, ParallelPlan.parse("tp4"), decode(8, 4096))
    assert costs["collectives"].link_bytes == 2 * 73_728 * 121 + 0.75 * 8 * 400_128
    alone = step_costs(FLASH, FOUR_BIT, ONE, decode(8, 4096))
    for part in ("sparse_attention", "head", "experts", "shared_experts", "dense_mlp"):
        assert costs[part].num_flops == alone[part].num_flops / 4, part
    # A quarter of q, k, v and out; one index head and the whole key.
    assert costs["projections"].num_flops == 2 * 8 * 60 * 6144 * (136 // 4 + 2) * 128
    # Every rank has all index keys, and one head that scans them.
    scan = alone["index_scan"]
    assert costs["index_scan"] == PartCost(scan.num_bytes, scan.num_flops / 4)


def test_scanning_by_blocks_divides_the_bytes_and_sends_candidates() -> None:
    shape = decode(8, 131_072)
    by_heads = step_costs(FLASH, FOUR_BIT, ParallelPlan.parse("tp4"), shape)
    by_blocks = step_costs(FLASH, FOUR_BIT, ParallelPlan.parse("tp4dcp4"), shape)
    assert by_blocks["index_scan"].num_bytes == by_heads["index_scan"].num_bytes / 4
    assert by_blocks["index_scan"].num_flops == by_heads["index_scan"].num_flops
    # A score and an id of 16 blocks of 4 heads, to the 3 of 4 ranks that own the heads.
    sent = by_blocks["collectives"].link_bytes - by_heads["collectives"].link_bytes
    assert sent == 60 * 8 * 4 * 16 * 8 * 3 / 4


def test_data_parallel_groups_divide_requests_and_send_rows_to_their_experts() -> None:
    costs = step_costs(FLASH, FOUR_BIT, ParallelPlan.parse("dep4"), decode(9, 4096))
    # The busiest group has 3 of 9 requests; experts see them all.
    assert costs["index_scan"].num_bytes == 60 * 3 * 4096 * 72
    assert costs["experts"].num_flops == 2 * 9 * 57 * 3 * 6144 * 3072
    share = distinct_experts(FLASH, 9) / 128 / 4
    assert costs["experts"].num_bytes == pytest.approx(share * 232_739_831_808)
    # C(96, 4) / C(128, 4): the share of tokens with no expert on a given rank.
    elsewhere = 3 * (1 - 3_321_960 / 10_668_000)
    assert costs["collectives"].link_bytes == pytest.approx(57 * 2 * 3 * elsewhere * 12_288)


def test_ranks_that_a_token_is_sent_to_are_the_average_over_all_choices() -> None:
    spec = small_spec()
    chosen = list(combinations(range(8), 4))
    remote = sum(len({e // 2 for e in picked} - {0}) for picked in chosen) / len(chosen)
    costs = step_costs(spec, ALL_FP32, ParallelPlan.parse("dep4"), decode(4, 1))
    assert costs["collectives"].link_bytes == pytest.approx(2 * 2 * remote * 96 * 4)


def test_a_model_without_experts_costs_nothing_for_them() -> None:
    spec = small_spec()
    dense = ModelSpec(**{**vars(spec), "layer_is_moe": (False,) * 3, "num_experts": 0})
    for word in ("tp1", "dep2"):
        costs = step_costs(dense, ALL_FP32, ParallelPlan.parse(word), decode(2, 300))
        assert costs["experts"] == costs["router"] == costs["shared_experts"] == PartCost()


def test_attention_costs_are_those_of_the_ops_own_cases() -> None:
    """One layer each, fp32, one row a request; the cases count whole blocks, so whole ones."""
    spec = small_spec()
    requests = tuple(Tokens(n, 1) for n in (512, 1024, 3072))
    steps = [step_costs(spec, ALL_FP32, ONE, decode(1, t.kv_len)) for t in requests]
    for part, layers, case in (
        ("index_scan", 2, select_cases._case("plan", requests)),
        ("sparse_attention", 2, sparse_cases._case("plan", requests)),
        ("dense_attention", 1, dense_cases._case("plan", requests)),
    ):
        total = sum((step[part] for step in steps), PartCost())
        assert total.num_bytes == layers * case.cost.num_bytes, part
        assert total.num_flops == layers * case.cost.num_flops, part


def test_product_and_norm_costs_are_those_of_the_ops_own_cases() -> None:
    spec = small_spec()
    step = step_costs(spec, ALL_FP32, ONE, decode(1, 1))
    mlp = mlp_cases._case("fp32", "fp32", 1).cost
    assert (step["dense_mlp"].num_bytes, step["dense_mlp"].num_flops) == (
        mlp.num_bytes, mlp.num_flops,
    )  # fmt: skip
    moe = moe_cases._case("fp32", "fp32", 1).cost
    assert step["experts"].num_bytes == pytest.approx(2 * moe.num_bytes)
    assert step["experts"].num_flops == 2 * moe.num_flops
    vocabulary = linear_cases._case("plain", "fp32", 1, n=320, k=96).cost
    looked_up = 96 * 4
    assert step["head"].num_bytes == vocabulary.num_bytes + looked_up
    assert step["head"].num_flops == vocabulary.num_flops
    norm = norm_cases._case("plan", norm_cases._random(7, 96, norm_cases.DTYPES["fp32"])).cost
    weights = 4 * (7 * 96 + 3 * 2 * 64 + 2 * 2 * 128)
    assert step["norms"].num_bytes == norm.num_bytes + weights
    assert step["norms"].num_flops == norm.num_flops
