"""Hopper's sparse attention against the reference; without a GPU, its arithmetic and its build."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops import cuda_build
from winnow.ops.batch import Batch
from winnow.ops.case_data import LAYER, Tokens, filled, small_spec
from winnow.ops.codec import reference as codec
from winnow.ops.paged import CacheScales, LayerPages, layer_pages, write
from winnow.ops.sparse_attention import hopper
from winnow.ops.sparse_attention.cases import random_ids
from winnow.ops.sparse_attention.reference import sparse_attention
from winnow.spec.formats import FORMATS
from winnow.spec.page import RowLayout

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs an H100 or H200",
)
nvcc = pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")

SPEC = replace(small_spec(), num_heads=64, head_dim=128)
TOPK = 16
STORED = ("nvfp4", "fp8", "bf16")
BF16 = 2.0**-8
"""Relative L2 error allowed of outputs in bf16; their rounding alone is about 2^-9.4."""
WEIGHTS = 2.0**-11
"""The same before outputs are rounded: softmax weights are fp16, one rounding each."""
SEQUENCES = {
    "edges": tuple(Tokens(n, 1) for n in (1, 0, 31, 32, 33, 127, 128, 129, 511, 512, 513, 3000)),
    "few blocks": tuple(Tokens(128 * n + 5, 1) for n in range(1, 17)),
    "verify": (Tokens(700, 4), Tokens(129, 8), Tokens(0, 2), Tokens(3000, 5)),
    "more than one round": tuple(Tokens(1 + 37 * i % 700 if i % 7 else 0, 1) for i in range(210)),
    "many short rows": tuple(Tokens(600 if i % 30 == 7 else 1 + i % 40, 1) for i in range(210)),
    "padding alone": (Tokens(0, 1),),
}


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    ids: Tensor
    batch: Batch
    pages: LayerPages


def layout_of(stored: str) -> RowLayout:
    return RowLayout.of(SPEC, FORMATS[stored], FORMATS[stored])


def inputs(
    tokens: tuple[Tokens, ...],
    scales: CacheScales | None = None,
    first_page: int = 1,
    stored: str = "nvfp4",
) -> Inputs:
    state = filled(tokens, stored, stored, spec=SPEC, first_page=first_page)
    generator = torch.Generator().manual_seed(29)
    q = torch.randn(state.batch.num_rows, SPEC.num_heads, SPEC.head_dim, generator=generator)
    ids = random_ids(state.batch, SPEC.num_kv_heads, TOPK, generator)
    pages = layer_pages(state.rows, layout_of(stored), LAYER, scales)
    return Inputs(q.bfloat16(), ids, state.batch, pages)


def on_gpu(x: Inputs) -> Inputs:
    layout = layout_of(x.pages.key.format.name)
    storage = torch.empty(0, dtype=torch.uint8).set_(x.pages.key.codes.untyped_storage())
    rows = storage.view(-1, layout.row_bytes).to("cuda")
    scales = CacheScales(x.pages.key.global_scale, x.pages.value.global_scale)
    batch = Batch(*(t.to("cuda") for t in vars(x.batch).values() if isinstance(t, Tensor)))
    return Inputs(x.q.to("cuda"), x.ids.to("cuda"), batch, layer_pages(rows, layout, LAYER, scales))


def run(x: Inputs, splits: int, groups: int, dtype: torch.dtype) -> Tensor:
    """The kernel's output over an output full of NaN."""
    out = torch.full(x.q.shape, float("nan"), dtype=dtype, device="cuda")
    hopper.attend(x.q, x.ids, x.batch, x.pages, out, splits, groups)
    return out.float().cpu()


def expected(x: Inputs) -> Tensor:
    return sparse_attention(x.q.float(), x.ids, x.batch, x.pages)


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2; rows that must be zero must be zero."""
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.nan_to_num(), want.nan_to_num()
    assert not got[(want == 0).all(-1)].any()
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def check(x: Inputs) -> None:
    want, device = expected(x), on_gpu(x)
    for splits, groups in product(hopper.SPLITS, hopper.GROUPS):
        exact = error(run(device, splits, groups, torch.float32), want)
        rounded = error(run(device, splits, groups, torch.bfloat16), want)
        print(f"splits {splits}, groups {groups}: fp32 {exact:.2e}, bf16 {rounded:.2e}")
        assert exact <= WEIGHTS
        assert rounded <= BF16


@gpu
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", SEQUENCES)
def test_output_is_the_references_within_bf16_whatever_the_shares(name: str, stored: str) -> None:
    check(inputs(SEQUENCES[name], stored=stored))


@gpu
@pytest.mark.parametrize("stored", STORED)
def test_global_scales_of_k_and_v_count(stored: str) -> None:
    scales = None if stored == "bf16" else CacheScales(key=0.37, value=3.1)
    check(inputs(SEQUENCES["edges"], scales, stored=stored))


@gpu
@pytest.mark.parametrize("stored", STORED)
def test_pages_beyond_two_gigabytes_are_found(stored: str) -> None:
    first = (1 << 31) // layout_of(stored).row_bytes + 3
    check(inputs((Tokens(2000, 1), Tokens(3, 1)), first_page=first, stored=stored))


@gpu
@pytest.mark.parametrize("stored", ["nvfp4", "fp8"])
@pytest.mark.parametrize(("factor", "key_scale"), [(50, 1), (2.0**40, 2.0**-40), (2.0**-100, 1)])
def test_queries_of_any_size_keep_their_bits(factor: float, key_scale: float, stored: str) -> None:
    x = inputs(SEQUENCES["verify"], CacheScales(key=key_scale), stored=stored)
    check(replace(x, q=x.q * factor))


@gpu
def test_heads_far_apart_in_memory_are_read_in_place() -> None:
    x = inputs(SEQUENCES["verify"])
    check(replace(x, q=x.q.repeat(1, 2, 1)[:, ::2]))


@gpu
@pytest.mark.parametrize("stored", STORED)
def test_fewer_query_heads_than_the_instruction_has_rows(stored: str) -> None:
    x = inputs(SEQUENCES["verify"], stored=stored)
    check(replace(x, q=x.q[:, :20].contiguous()))


@gpu
def test_values_across_the_range_of_the_format_are_exact() -> None:
    x = inputs((Tokens(300, 1),))
    generator = torch.Generator().manual_seed(3)
    tables = x.batch.block_tables[0]
    tokens = torch.arange(300)
    slots = (tables[tokens // 128], tokens % 128)
    exponents = torch.randint(-9, 12, (300, SPEC.num_kv_heads, 8, 1), generator=generator)
    values = torch.randn(300, SPEC.num_kv_heads, 8, 16, generator=generator) * 2.0**exponents
    write(codec, x.pages.value, values.flatten(2), *slots)
    check(x)


@gpu
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("groups", hopper.GROUPS)
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_nan_stays_with_its_request(part: str, groups: int, stored: str) -> None:
    x = inputs((Tokens(129, 1), Tokens(700, 1)), stored=stored)
    bad = torch.full((1, SPEC.num_kv_heads, SPEC.head_dim), float("nan"))
    page = x.batch.block_tables[:1, 0]
    write(codec, getattr(x.pages, part), bad, page, torch.zeros_like(page))
    got, want = run(on_gpu(x), 4, groups, torch.bfloat16), expected(x)
    assert want[0].isnan().all()
    assert error(got, want) <= BF16


@gpu
@pytest.mark.parametrize("groups", hopper.GROUPS)
def test_ids_after_the_position_are_not_followed(groups: int) -> None:
    x = inputs((Tokens(300, 1),))
    stale = x.ids.clone()
    stale[:, :, 3:5] = torch.tensor([3, 1 << 30])
    got, want = run(on_gpu(replace(x, ids=stale)), 2, groups, torch.bfloat16), expected(x)
    assert error(got, want) <= BF16


@gpu
def test_a_graph_follows_lengths_and_ids_and_repeats_bit_for_bit() -> None:
    x = inputs((Tokens(900, 1), Tokens(700, 1)))
    shorter = replace(x.batch, positions=torch.tensor([129, 0]), kv_lens=torch.tensor([130, 0]))
    ids = random_ids(shorter, SPEC.num_kv_heads, TOPK, torch.Generator().manual_seed(1))
    for splits, groups in product(hopper.SPLITS, hopper.GROUPS):
        device, later = on_gpu(x), on_gpu(replace(x, batch=shorter, ids=ids))
        want = [run(v, splits, groups, torch.bfloat16) for v in (device, later)]
        out = torch.full_like(device.q, float("nan"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hopper.attend(device.q, device.ids, device.batch, device.pages, out, splits, groups)
        for _ in range(3):
            graph.replay()
            assert torch.equal(out.float().cpu(), want[0])
        device.ids.copy_(later.ids)
        device.batch.positions.copy_(later.batch.positions)
        device.batch.kv_lens.copy_(later.batch.kv_lens)
        graph.replay()
        assert torch.equal(out.float().cpu(), want[1])


@gpu
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("groups", hopper.GROUPS)
def test_a_row_has_the_same_bits_in_the_kernel_for_few_pairs_and_for_many(
    groups: int, stored: str
) -> None:
    x = on_gpu(inputs(SEQUENCES["more than one round"], stored=stored))
    b = x.batch
    few = Batch(
        b.positions[:9], b.row_request[:9], b.row_starts[:10], b.kv_lens[:9], b.block_tables[:9]
    )
    got = run(Inputs(x.q[:9], x.ids[:9], few, x.pages), 1, groups, torch.float32)
    assert got.any()
    assert torch.equal(got, run(x, 1, groups, torch.float32)[:9])


@nvcc
def test_the_kernel_builds() -> None:
    assert cuda_build.build(hopper.SOURCE).is_file()


def test_a_code_times_a_scale_is_exact_in_the_fp16_of_the_kernel() -> None:
    codes = np.arange(16, dtype=np.uint16)
    halves = ((codes & 7) << 9 | (codes & 8) << 12).view(np.float16)
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    scales = bytes_.view(torch.float8_e4m3fn).float().numpy()
    scales = scales[np.isfinite(scales)]
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([e2m1, -e2m1])
    assert np.array_equal(halves.astype(np.float64) * 2.0**14, values)
    products = np.multiply.outer(halves, scales.astype(np.float16))
    assert products.dtype == np.float16
    want = np.multiply.outer(values, scales.astype(np.float64)) * 2.0**-14
    assert np.array_equal(products.astype(np.float64), want)


def test_products_and_a_complement_bring_codes_to_fp16() -> None:
    # `expand` of decode_nvfp4.cuh: eight codes to four pairs of fp16 with signs turned around.
    words = np.random.default_rng(7).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    words = np.concatenate([words, np.arange(16, dtype=np.uint32) * np.uint32(0x11111111)])
    even = words & 0x0F0F0F0F ^ np.uint32(0x07070707)
    odd = words & 0xF0F0F0F0 ^ np.uint32(0x70707070)
    moved = (even * np.uint32(4608), odd * np.uint32(288), even * np.uint32(18), odd + (odd >> 3))
    for pair, bits in enumerate(moved):
        halves = (~bits & np.uint32(0x8E008E00)).view(np.uint16).reshape(-1, 2)
        for half, code in ((0, words >> 4 * pair), (1, words >> 4 * (pair + 4))):
            want = ((code & 7) << 9 | (code & 8) << 12).astype(np.uint16).view(np.float16)
            assert np.array_equal(halves[:, half].view(np.float16), -want)


def test_one_group_fills_the_gpu_where_pairs_are_few_or_many() -> None:
    found = [hopper.shares_for(n, 16, "nvfp4", 132) for n in (0, 1, 4, 16, 26, 265, 1024)]
    assert found == [(16, 1), (16, 1), (16, 1), (8, 1), (4, 1), (1, 1), (1, 1)]


def test_two_groups_serve_as_many_pairs_as_have_room_at_once() -> None:
    assert [hopper.shares_for(n, 16, "nvfp4", 132)[0] for n in (27, 66, 67, 264)] == [2, 2, 1, 1]
    assert [hopper.shares_for(n, 16, "fp8", 132)[0] for n in (27, 66, 67, 132)] == [2, 2, 1, 1]
    for stored, pairs in product(STORED, range(400)):
        groups = hopper.shares_for(pairs, 16, stored, 132)[1]
        assert groups == (2 if 26 < pairs <= (264 if stored == "nvfp4" else 132) else 1)


@pytest.mark.parametrize("topk", range(1, 17))
def test_no_group_is_without_a_block(topk: int) -> None:
    for stored, pairs in product(STORED, range(300)):
        splits, groups = hopper.shares_for(pairs, topk, stored, 132)
        assert splits in hopper.SPLITS
        assert splits * groups <= topk


def test_what_the_kernel_cannot_take_is_refused_with_numbers() -> None:
    x = inputs((Tokens(5, 1),))
    out = torch.empty(x.q.shape)
    with pytest.raises(UnsupportedError, match=r"not torch.float32 and nvfp4"):
        hopper.attend(x.q.float(), x.ids, x.batch, x.pages, out, 1, 1)
    wide = torch.full((1, SPEC.num_kv_heads, 33), -1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"not 128, 16 and 33"):
        hopper.attend(x.q, wide, x.batch, x.pages, out, 1, 1)
