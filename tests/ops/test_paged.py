"""Views of page rows: what is written lands where the layout says, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from winnow.ops.block_list import block_list, expand, insert
from winnow.ops.case_data import small_spec
from winnow.ops.codec import reference as codec
from winnow.ops.paged import Paged, layer_pages, read, write
from winnow.spec.formats import FORMATS
from winnow.spec.page import Part, RowLayout

SPEC = small_spec()


def make(kv: str, index: str) -> tuple[torch.Tensor, RowLayout]:
    layout = RowLayout.of(SPEC, FORMATS[kv], FORMATS[index])
    return torch.zeros(5, layout.row_bytes, dtype=torch.uint8), layout


def changed(rows: torch.Tensor, page: int) -> set[int]:
    """Offsets of the bytes of a page that are not zero; every other page must be all zeros."""
    others = [p for p in range(rows.shape[0]) if p != page]
    assert not rows[others].any()
    return set(rows[page].nonzero().flatten().tolist())


def token_bytes(part: Part, token: int) -> set[int]:
    """Where one token's codes and scales lie, from the layout's arithmetic."""
    codes, scales = part.format.code_bytes(part.dim), part.format.scale_bytes(part.dim)
    return {part.codes + token * codes + i for i in range(codes)} | {
        part.scales + token * scales + i for i in range(scales)
    }


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_token_is_written_to_its_own_bytes_and_no_others(fmt: str, layer: int) -> None:
    rows, layout = make(fmt, fmt)
    pages = layer_pages(rows, layout, layer)
    page, token = torch.tensor([3]), torch.tensor([77])
    ones = torch.full((1, SPEC.num_kv_heads, SPEC.head_dim), 1.3)
    write(codec, pages.key, ones, page, token)
    expected = [token_bytes(layout.key(layer, h), 77) for h in range(SPEC.num_kv_heads)]
    assert changed(rows, 3) <= set().union(*expected)
    assert all(changed(rows, 3) & own for own in expected)
    write(codec, pages.value, ones, page, token)
    expected += [token_bytes(layout.value(layer, h), 77) for h in range(SPEC.num_kv_heads)]
    if pages.index is not None:
        write(codec, pages.index, torch.full((1, 1, SPEC.index_dim), 1.3), page, token)
        expected.append(token_bytes(layout.index(layer), 77))
    assert changed(rows, 3) <= set().union(*expected)
    assert all(changed(rows, 3) & own for own in expected)
    total = sum(map(len, expected))
    assert len(set().union(*expected)) == total, "two parts share bytes"


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp8", "nvfp4"])
def test_what_is_read_is_what_was_written_after_rounding(fmt: str) -> None:
    rows, layout = make(fmt, fmt)
    paged = layer_pages(rows, layout, 1).value
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(256, SPEC.num_kv_heads, SPEC.head_dim, generator=generator)
    slots = torch.tensor([4, 2]).repeat_interleave(128), torch.arange(128).repeat(2)
    write(codec, paged, values, *slots)
    got = read(codec, paged, torch.tensor([4, 2]), torch.float32).transpose(1, 2).flatten(0, 1)
    bound = {"fp32": 0.0, "bf16": 2.0**-8, "fp8": 2.0**-4, "nvfp4": 0.13}[fmt]
    worst = (got - values).norm() / values.norm()
    assert worst <= bound


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp8", "nvfp4"])
def test_the_fast_ways_in_and_out_of_a_page_give_the_same_bits(fmt: str) -> None:
    rows, layout = make(fmt, fmt)
    again = rows.clone()
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(300, SPEC.num_kv_heads, SPEC.head_dim, generator=generator) * 20
    values[7, 1, 3], values[9, 0, 0] = float("inf"), float("nan")
    values[11, 2] = 0.0
    order = torch.randperm(5 * 128, generator=generator)[:300]
    slots = order // 128, order % 128
    plain, fast = (layer_pages(r, layout, 1).value for r in (rows, again))
    write(codec, plain, values, *slots)
    insert(fast, values, *slots)
    assert torch.equal(rows, again)
    assert plain.clipping == fast.clipping
    pages, heads = torch.tensor([4, 0, 2, 4]), torch.tensor([0, 3, 1, 2])
    want = read(codec, plain, pages, torch.float32)[torch.arange(4), heads]
    table = block_list(fast, pages, heads)
    assert table.addresses.shape == pages.shape
    if fmt != "fp32":
        got = expand(fast, pages, heads)
        assert torch.equal(got.nan_to_num(12345.0), want.nan_to_num(12345.0))


def test_what_saturates_is_counted_and_nan_is_kept() -> None:
    for fmt, limit in (("fp8", 448.0), ("nvfp4", 448.0 * 6)):
        rows, layout = make(fmt, "fp32")
        paged: Paged = layer_pages(rows, layout, 0).key
        values = torch.ones(1, SPEC.num_kv_heads, SPEC.head_dim)
        values[0, 0, 0], values[0, 1, 5], values[0, 2, 1] = 4 * limit, float("inf"), float("nan")
        write(codec, paged, values, torch.tensor([1]), torch.tensor([0]))
        assert paged.clipping.written == values.numel()
        assert paged.clipping.clipped >= 2
        got = read(codec, paged, torch.tensor([1]), torch.float32)[0, :, 0]
        assert got[0, 0] == limit
        assert got[1, 5] == limit
        assert got[2, 1].isnan()
        assert not got[3].isnan().any()
