"""The Hopper indexer: what it promises on any machine, and against the reference on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops.batch import Batch
from winnow.ops.case import Case, to_device
from winnow.ops.case_data import Filled, Tokens, eighths, filled, small_spec
from winnow.ops.codec.elements import decode_e2m1
from winnow.ops.cuda_build import build, compiler
from winnow.ops.paged import Paged
from winnow.ops.select_blocks.cases import CASES
from winnow.ops.select_blocks.hopper import SOURCE, select_blocks
from winnow.ops.select_blocks.reference import select_blocks as reference

needs_nvcc = pytest.mark.skipif(compiler() is None, reason="nvcc is not installed")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="there is no Hopper GPU",
)

FORMATS = ("nvfp4", "fp8", "bf16")
SERVED = [case for case in CASES if any(f"index {name}" in case.name for name in FORMATS)]
DECODE = (
    *(Tokens(n, 1) for n in (0, 1, 127, 128, 129, 1920, 2048, 2049, 2176, 2177, 8192, 40_001)),
    *(Tokens(n, 1) for n in (65_535, 131_072, 0)),
)
VERIFY = (
    *(Tokens(n, 8) for n in (8, 130, 2050, 2180, 9000)),
    *(Tokens(n, 2) for n in (2049, 70_000)),
    *(Tokens(n, 1) for n in (0, 3000)),
    *(Tokens(n, 5) for n in (2051, 20_000)),
)


@needs_nvcc
def test_the_kernels_compile() -> None:
    assert build(SOURCE).stat().st_size > 0


def test_a_code_moved_and_scaled_as_the_kernel_does_is_exact_in_fp16() -> None:
    codes = torch.arange(16)
    moved = ((codes & 7) << 9) | ((codes & 8) << 12)
    halves = moved.to(torch.int32).to(torch.uint16).view(torch.float16)
    scales = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = halves[:, None] * scales.to(torch.float16)[None]
    want = decode_e2m1(codes)[:, None].double() * scales.double()[None] * 2.0**-14
    assert torch.equal(got.double(), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 17}, "at most 16, not 17"),
        ({"dim": 64}, "one of \\(128,\\), not 64"),
        ({"heads": 3}, "one of \\(1, 2, 4, 8\\), not 3"),
        ({"dtype": torch.float16}, "not torch.float16"),
        ({"format": "fp32"}, "holds fp32: start with index_format \\(--index-format\\) nvfp4"),
        ({"format": "bf16", "dtype": torch.float32}, "not torch.float32 over bf16"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_with_a_reason(
    change: dict[str, Any], message: str
) -> None:
    state = filled((Tokens(130, 1),), "fp32", change.get("format", "nvfp4"))
    shape = (1, change.get("heads", 4), change.get("dim", 128))
    query = torch.zeros(shape, dtype=change.get("dtype", torch.bfloat16))
    assert state.pages.index is not None
    with pytest.raises(UnsupportedError, match=message):
        select_blocks(query, state.pages.index, state.batch, change.get("topk", 16))


def test_tensors_on_the_cpu_are_refused_before_a_kernel_reads_their_addresses() -> None:
    state = filled((Tokens(130, 1),), "fp32", "nvfp4")
    assert state.pages.index is not None
    with pytest.raises(ValueError, match=r"positions is torch\.int64 on cpu"):
        select_blocks(torch.zeros(1, 4, 128), state.pages.index, state.batch, 16)


@needs_hopper
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_every_case_selects_what_the_reference_selects(case: Case) -> None:
    got = on_gpu(**case.inputs())
    assert torch.equal(got, reference(**case.inputs()))


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [DECODE, DECODE[10:11], VERIFY], ids=["decode", "one", "verify"])
@pytest.mark.parametrize(("heads", "topk"), [(4, 16), (1, 16), (8, 2), (2, 1)])
def test_long_and_ragged_batches_select_what_the_reference_selects(
    tokens: tuple[Tokens, ...], dtype: torch.dtype, heads: int, topk: int
) -> None:
    index_q, state = long_inputs(tokens, heads)
    inputs = (index_q.to(dtype), state.pages.index, state.batch, topk)
    assert torch.equal(on_gpu(*inputs), reference(*inputs))


@needs_hopper
@pytest.mark.parametrize("stored", ["fp8", "bf16"])
@pytest.mark.parametrize("tokens", [DECODE, DECODE[10:11], VERIFY], ids=["decode", "one", "verify"])
def test_wider_keys_select_what_the_reference_selects(
    tokens: tuple[Tokens, ...], stored: str
) -> None:
    index_q, state = long_inputs(tokens, 4, stored)
    inputs = (index_q.bfloat16(), state.pages.index, state.batch, 16)
    assert torch.equal(on_gpu(*inputs), reference(*inputs))


@needs_hopper
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [*((name, torch.bfloat16) for name in FORMATS), *((n, torch.float32) for n in FORMATS[:2])],
    ids=str,
)
def test_any_number_of_columns_a_pass_selects_what_the_reference_selects(
    stored: str, dtype: torch.dtype, rows: int
) -> None:
    tokens = tuple(Tokens(n, rows) for n in (rows, 130, 2180, 3000))
    index_q, state = long_inputs(tokens, 4, stored)
    inputs = (index_q.to(dtype), state.pages.index, state.batch, 16)
    assert torch.equal(on_gpu(*inputs), reference(*inputs))


@needs_hopper
@pytest.mark.parametrize("stored", FORMATS)
def test_a_row_selects_the_same_whatever_rows_stand_beside_it(stored: str) -> None:
    """Random values: sums that round, near ties among thousands of blocks."""
    state = long_pages((Tokens(40_000, 8),), stored)
    generator = torch.Generator().manual_seed(8)
    assert state.pages.index is not None
    index = to_gpu(state.pages.index)
    codes = index.codes.view(torch.uint8)
    codes.copy_(torch.randint(256, codes.shape, generator=generator, dtype=torch.uint8))
    if stored != "nvfp4":
        codes.bitwise_and_(0xBF)
    index_q = torch.randn(8, 4, 128, generator=generator).bfloat16().cuda()
    batch = batch_to_gpu(state.batch)
    together = select_blocks(index_q, index, batch, 16)
    for first, end in ((0, 1), (3, 4), (7, 8), (0, 2), (4, 8)):
        rows = slice(first, end)
        alone = replace(
            batch,
            positions=batch.positions[rows],
            row_request=batch.row_request[rows],
            row_starts=torch.tensor([0, end - first], device="cuda"),
        )
        got = select_blocks(index_q[rows].contiguous(), index, alone, 16)
        assert torch.equal(got, together[rows])


@needs_hopper
@pytest.mark.parametrize("columns", [1025, 5000, 12_000])
def test_a_table_wider_than_its_sequences_changes_nothing(columns: int) -> None:
    index_q, state = long_inputs(DECODE, 4)
    tables = state.batch.block_tables
    wide = torch.nn.functional.pad(tables, (0, columns - tables.shape[1]))
    batch = replace(state.batch, block_tables=wide)
    got = on_gpu(index_q, state.pages.index, batch, 16)
    assert torch.equal(got, reference(index_q, state.pages.index, state.batch, 16))


@needs_hopper
def test_hundreds_of_requests_that_share_pages_select_each_for_itself() -> None:
    _, state = long_inputs(DECODE[10:11], 4)
    generator = torch.Generator().manual_seed(7)
    starts = torch.randint(8189, (300,), generator=generator).tolist()
    counts = [1 + i % 3 for i in range(300)]
    batch = Batch.of(starts, counts, [state.batch.block_tables[0].tolist()] * 300)
    index_q = eighths(generator, batch.num_rows, 4, 128)
    got = on_gpu(index_q, state.pages.index, batch, 16)
    assert torch.equal(got, reference(index_q, state.pages.index, batch, 16))


@needs_hopper
def test_a_captured_call_follows_lengths_that_change_on_the_device() -> None:
    index_q, state = long_inputs(DECODE, 4)
    assert state.pages.index is not None
    device_q, index, batch = index_q.cuda(), to_gpu(state.pages.index), batch_to_gpu(state.batch)
    select_blocks(device_q, index, batch, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = select_blocks(device_q, index, batch, 16)
    for cut in (0, 100, 4000):
        kv_lens = (state.batch.kv_lens - cut).clamp_min(0)
        positions = (kv_lens[state.batch.row_request] - 1).clamp_min(0)
        shorter = replace(state.batch, kv_lens=kv_lens, positions=positions)
        batch.kv_lens.copy_(kv_lens)
        batch.positions.copy_(positions)
        ids.fill_(-7)
        graph.replay()
        assert torch.equal(ids.cpu(), reference(index_q, state.pages.index, shorter, 16))


@needs_hopper
def test_ties_among_thousands_of_blocks_go_to_the_lowest_ids() -> None:
    tokens = (Tokens(140_000, 1),)
    key = eighths(torch.Generator().manual_seed(5), 1, 128)
    state = filled(tokens, "nvfp4", "nvfp4", index_keys=key.expand(140_000, 128))
    index_q = eighths(torch.Generator().manual_seed(6), 1, 4, 128)
    got = on_gpu(index_q, state.pages.index, state.batch, 16)
    assert got.tolist() == [[[*range(15), 139_999 // 128]] * 4]


def long_inputs(
    tokens: tuple[Tokens, ...], heads: int, stored: str = "nvfp4"
) -> tuple[Tensor, Filled]:
    """Index queries and pages, the latter made once and only read."""
    state = long_pages(tokens, stored)
    generator = torch.Generator().manual_seed(4)
    return eighths(generator, state.batch.num_rows, heads, small_spec().index_dim), state


@cache
def long_pages(tokens: tuple[Tokens, ...], stored: str = "nvfp4") -> Filled:
    """Pages of narrow keys and values, so that long sequences are soon filled."""
    spec = replace(small_spec(), head_dim=16, rotary_dim=16)
    return filled(tokens, "nvfp4", stored, seed=3, spec=spec)


def on_gpu(index_q: Tensor, index: Paged | None, batch: Batch, topk: int) -> Tensor:
    """The kernels' ids, from outputs and scratch memory that held other numbers before."""
    assert index is not None
    device_q = index_q.cuda() if index_q.is_contiguous() else strided_to_gpu(index_q)
    device_index, device_batch = to_gpu(index), batch_to_gpu(batch)
    poison = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 12, 1 << 16, 1 << 20)]
    del poison
    ids = select_blocks(device_q, device_index, device_batch, topk)
    torch.cuda.synchronize()
    return ids.cpu()


def strided_to_gpu(view: Tensor) -> Tensor:
    """`view` on the GPU with its strides, by way of its whole storage."""
    bytes_ = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
    whole = bytes_.cuda().view(view.dtype)
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())


def to_gpu(index: Paged) -> Paged:
    """Codes and scales in one copy of their rows, as `layer_pages` would view them there."""
    return to_device(index, "cuda")


def batch_to_gpu(batch: Batch) -> Batch:
    return Batch(
        positions=batch.positions.cuda(),
        row_request=batch.row_request.cuda(),
        row_starts=batch.row_starts.cuda(),
        kv_lens=batch.kv_lens.cuda(),
        block_tables=batch.block_tables.cuda(),
    )
