"""Hopper's prefill attention against the reference; without a GPU, its arithmetic and its build."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops import cuda_build
from winnow.ops.batch import Batch
from winnow.ops.case import error, to_device
from winnow.ops.case_data import LAYER, Tokens, filled, small_spec
from winnow.ops.codec import reference as codec
from winnow.ops.paged import CacheScales, LayerPages, layer_pages, write
from winnow.ops.sparse_attention import hopper_prefill as hopper
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
BF16 = 2.0**-8
"""Relative L2 error allowed of outputs in bf16."""
STORED = ("bf16", "fp8", "nvfp4")
SEQUENCES = {
    "one request": (Tokens(300, 300),),
    "long past": (Tokens(4500, 70),),
    "early and late rows": (Tokens(8260, 140),),
    "ragged": (Tokens(260, 130), Tokens(1300, 70), Tokens(0, 3), Tokens(1000, 1), Tokens(257, 17)),
    "edges": tuple(Tokens(n, min(n, 9)) for n in (1, 2, 127, 128, 129, 130, 511, 512, 513, 2500)),
    "single rows": tuple(Tokens(1 + 53 * i % 700 if i % 5 else 0, 1) for i in range(70)),
    "a row": (Tokens(2049, 1),),
    "padding alone": (Tokens(0, 2),),
}


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    ids: Tensor
    batch: Batch
    pages: LayerPages

    def to(self, device: str) -> Inputs:
        return Inputs(**to_device(vars(self), device))


def inputs(
    tokens: tuple[Tokens, ...],
    stored: str = "nvfp4",
    scales: CacheScales | None = None,
    first_page: int = 1,
    topk: int = TOPK,
) -> Inputs:
    state = filled(tokens, stored, "fp32", spec=SPEC, first_page=first_page)
    generator = torch.Generator().manual_seed(31)
    q = torch.randn(state.batch.num_rows, SPEC.num_heads, SPEC.head_dim, generator=generator)
    ids = random_ids(state.batch, SPEC.num_kv_heads, topk, generator)
    layout = RowLayout.of(SPEC, FORMATS[stored], FORMATS["fp32"])
    return Inputs(q.bfloat16(), ids, state.batch, layer_pages(state.rows, layout, LAYER, scales))


def run(x: Inputs) -> Tensor:
    """The kernels' output over an output full of NaN."""
    out = torch.full(x.q.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    for chunk in hopper.chunks(x.q, x.ids, x.batch, x.pages, out):
        chunk.partial.fill_(float("nan"))
        chunk.logs.fill_(float("nan"))
        chunk.list_rows()
        for group in range(chunk.groups):
            chunk.attend(group)
            chunk.combine(group)
    return out.cpu()


def expected(x: Inputs) -> Tensor:
    return sparse_attention(x.q.float(), x.ids, x.batch, x.pages)


def check(x: Inputs) -> Tensor:
    want, got = expected(x), run(x.to("cuda"))
    wrong = error(got.float(), want)
    print(f"relative error {wrong:.2e}")
    assert wrong <= BF16
    assert not got[(want == 0).flatten(1).all(-1)].any(), "padding is not zero"
    return got


@gpu
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", SEQUENCES)
def test_output_is_the_references_in_every_format(name: str, stored: str) -> None:
    check(inputs(SEQUENCES[name], stored))


@gpu
@pytest.mark.parametrize("topk", [1, 3, 32])
def test_any_number_of_blocks_up_to_the_most(topk: int) -> None:
    check(inputs(SEQUENCES["ragged"], topk=topk))
    check(inputs((Tokens(4500, 9),), topk=topk))


@gpu
@pytest.mark.parametrize("rows_at_a_time", [1, 2, 4, 37])
def test_small_scratch_gives_the_same_bits(
    rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs(SEQUENCES["ragged"]).to("cuda")
    want = run(x)
    row = TOPK * hopper.GROUP * hopper.HEAD_DIM * 2
    monkeypatch.setattr(hopper, "SCRATCH_BYTES", rows_at_a_time * row * 16)
    assert torch.equal(run(x), want)


@gpu
@pytest.mark.parametrize("stored", STORED)
def test_a_row_gives_the_same_bits_beside_any_others(stored: str) -> None:
    x = inputs((Tokens(2180, 150),), stored).to("cuda")
    want = run(x)
    for first, end in ((0, 150), (3, 70), (64, 150), (100, 101)):
        batch = replace(
            x.batch,
            positions=x.batch.positions[first:end].contiguous(),
            row_request=x.batch.row_request[first:end].contiguous(),
            row_starts=torch.tensor([0, end - first], device="cuda"),
        )
        few = replace(x, q=x.q[first:end], ids=x.ids[first:end], batch=batch)
        assert torch.equal(run(few), want[first:end])


@gpu
def test_global_scales_of_k_and_v_count() -> None:
    for stored in ("fp8", "nvfp4"):
        check(inputs(SEQUENCES["ragged"], stored, CacheScales(key=0.37, value=3.1)))


@gpu
@pytest.mark.parametrize("stored", STORED)
def test_pages_beyond_two_gigabytes_are_found(stored: str) -> None:
    row_bytes = RowLayout.of(SPEC, FORMATS[stored], FORMATS["fp32"]).row_bytes
    check(inputs((Tokens(700, 40), Tokens(3, 3)), stored, first_page=(1 << 31) // row_bytes + 3))


@gpu
def test_queries_between_others_in_memory() -> None:
    x = inputs(SEQUENCES["ragged"])
    wide = torch.cat([x.q, x.q], 1)[:, : SPEC.num_heads]
    odd = torch.cat([x.q, x.q[..., :1]], -1)[..., : SPEC.head_dim]
    assert torch.equal(check(x), check(replace(x, q=wide)))
    assert torch.equal(check(x), check(replace(x, q=odd)))


@gpu
@pytest.mark.parametrize(("factor", "key_scale"), [(50, 1), (2.0**40, 2.0**-40), (2.0**-100, 1)])
def test_queries_of_any_size_keep_their_bits(factor: float, key_scale: float) -> None:
    x = inputs(SEQUENCES["ragged"], scales=CacheScales(key=key_scale))
    check(replace(x, q=x.q * factor))


@gpu
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("stored", STORED)
def test_a_nan_stays_with_its_request(part: str, stored: str) -> None:
    x = inputs((Tokens(129, 5), Tokens(700, 40)), stored)
    bad = torch.full((1, SPEC.num_kv_heads, SPEC.head_dim), float("nan"))
    page = x.batch.block_tables[:1, 0]
    write(codec, getattr(x.pages, part), bad, page, torch.zeros_like(page))
    want, got = expected(x), run(x.to("cuda"))
    assert want[:5].isnan().all()
    assert error(got.float(), want) <= BF16


@gpu
def test_ids_after_the_position_are_not_followed() -> None:
    x = inputs((Tokens(300, 70),))
    stale = x.ids.clone()
    stale[:, :, 3:5] = torch.tensor([3, 1 << 30])
    got = run(replace(x, ids=stale).to("cuda"))
    assert error(got.float(), expected(x)) <= BF16


@gpu
def test_a_graph_follows_lengths_and_ids_and_repeats_bit_for_bit() -> None:
    x = inputs((Tokens(900, 100), Tokens(700, 30)))
    shorter = replace(
        x.batch,
        positions=torch.cat([torch.arange(29, 129), torch.zeros(30, dtype=torch.int64)]),
        kv_lens=torch.tensor([129, 0]),
    )
    ids = random_ids(shorter, SPEC.num_kv_heads, TOPK, torch.Generator().manual_seed(1))
    device, later = x.to("cuda"), replace(x, batch=shorter, ids=ids).to("cuda")
    want = [run(v) for v in (device, later)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = hopper.sparse_attention(device.q, device.ids, device.batch, device.pages)
    for _ in range(10):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out.cpu(), want[0])
    device.ids.copy_(later.ids)
    device.batch.positions.copy_(later.batch.positions)
    device.batch.kv_lens.copy_(later.batch.kv_lens)
    graph.replay()
    assert torch.equal(out.cpu(), want[1])


@nvcc
@pytest.mark.parametrize("source", [hopper.ATTEND, hopper.LISTS])
def test_the_kernels_build(source: object) -> None:
    assert cuda_build.build(source).is_file()  # type: ignore[arg-type]


def test_a_code_times_a_scale_is_exact_in_the_16_bits_of_the_kernel() -> None:
    codes = np.arange(16, dtype=np.uint32)
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([e2m1, -e2m1])
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    scales = bytes_.view(torch.float8_e4m3fn).float().numpy()
    scales = scales[np.isfinite(scales)]
    want = np.multiply.outer(values, scales.astype(np.float64))
    # K: a bf16's 16 bits are the upper ones of an fp32.
    keys = (((codes & 7) << 6 | (codes & 8) << 12) << 16).view(np.float32)
    assert np.array_equal(keys.astype(np.float64) * 2.0**126, values)
    products = np.multiply.outer(keys, scales * np.float32(2.0**118))
    assert np.array_equal(products.astype(np.float64) * 2.0**8, want)
    assert not (products.view(np.uint32) & 0xFFFF).any()
    # V
    halves = ((codes & 7) << 9 | (codes & 8) << 12).astype(np.uint16).view(np.float16)
    products = np.multiply.outer(halves, (scales * 2.0**7).astype(np.float16))
    assert products.dtype == np.float16
    assert np.array_equal(products.astype(np.float64) * 2.0**7, want)


def test_codes_spread_over_a_word_come_out_in_their_order() -> None:
    words = np.random.default_rng(3).integers(0, 1 << 32, 1000, dtype=np.uint64)
    for magnitude in (9, 6):
        mask = 0x00070007 << magnitude
        w = []
        for j in range(4):
            by = magnitude - 4 * j
            moved = words << np.uint64(by) if by >= 0 else words >> np.uint64(-by)
            signs = (words << np.uint64(12 - 4 * j)) & np.uint64(0x80008000)
            w.append((moved & np.uint64(mask)) | signs)
        low, high = np.uint64(0xFFFF), np.uint64(16)
        pairs = [
            (w[a] & low) | (w[b] & low) << high
            if first
            else (w[a] >> high) | (w[b] >> high) << high
            for first in (True, False)
            for a, b in ((0, 1), (2, 3))
        ]
        for i in range(8):
            code = (words >> np.uint64(4 * i)) & np.uint64(15)
            got = (pairs[i // 2] >> np.uint64(16 * (i % 2))) & low
            bits = (code & np.uint64(7)) << np.uint64(magnitude)
            assert np.array_equal(got, bits | (code & np.uint64(8)) << np.uint64(12))


def test_scratch_is_bounded_and_heads_share_it_while_they_fit() -> None:
    assert [
        hopper.group_heads_for(n, 4, 16) for n in (1, 4096, 4097, 8192, 8193, 16384, 19999)
    ] == [*(4, 4, 2, 2, 1, 1, 1)]
    assert hopper.group_heads_for(8192, 3, 16) == 1
    assert hopper.row_chunks(16384, 16) == [(0, 16384)]
    assert hopper.row_chunks(16385, 16) == [(0, 8192), (8192, 8193)]
    assert hopper.row_chunks(10000, 32) == [(0, 5000), (5000, 5000)]
    assert hopper.row_chunks(0, 16) == []
    for rows in (1, 77, 8192, 20000):
        assert sum(count for _, count in hopper.row_chunks(rows, 16)) == rows


def test_many_rows_a_request_are_taken_and_few_are_not() -> None:
    x = inputs((Tokens(300, 70),))
    assert hopper.takes(x.q, x.ids, x.batch, x.pages)
    few = inputs(tuple(Tokens(20, 8) for _ in range(20)))
    assert not hopper.takes(few.q, few.ids, few.batch, few.pages)
    assert not hopper.takes(x.q.float(), x.ids, x.batch, x.pages)
    assert not hopper.takes(x.q[:, :32], x.ids, x.batch, x.pages)


def test_what_the_kernels_cannot_take_is_refused_with_numbers() -> None:
    x = inputs((Tokens(5, 2),))
    out = torch.empty(x.q.shape)
    with pytest.raises(UnsupportedError, match=r"not torch.float32 and nvfp4"):
        next(hopper.chunks(x.q.float(), x.ids, x.batch, x.pages, out))
    with pytest.raises(UnsupportedError, match=r"not 128, 8 and 16"):
        next(hopper.chunks(x.q[:, :32], x.ids, x.batch, x.pages, out))
