"""The row layout, against published numbers and its own rules."""

from __future__ import annotations

from itertools import pairwise

import pytest

from winnow.errors import UnsupportedError
from winnow.spec.formats import BF16, FORMATS, FP8, NVFP4, cache_format
from winnow.spec.page import ALIGNMENT, RowLayout
from winnow.spec.presets import preset

FLASH = preset("minimax-m3.1-flash")


def test_the_flash_row_at_tp4_is_1822720_bytes_in_125_pieces() -> None:
    layout = RowLayout.of(FLASH, NVFP4, NVFP4, tp_size=4, draft_layers=5, draft_format=FP8)
    assert layout.row_bytes == 1_822_720
    assert len(list(layout.pieces())) == 125
    assert (layout.kv_piece_bytes, layout.index_piece_bytes) == (18_432, 9_216)
    assert layout.draft_piece_bytes == 32_768


@pytest.mark.parametrize("kv", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("index", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_pieces_tile_the_row_without_gap_or_overlap(kv, index, tp_size: int) -> None:  # type: ignore[no-untyped-def]
    layout = RowLayout.of(preset("minimax-m3"), kv, index, tp_size=tp_size, draft_layers=2)
    end = 0
    for _, start, num_bytes in layout.pieces():
        assert start == end
        assert start % ALIGNMENT == 0
        end = start + num_bytes
    assert end == layout.row_bytes


def test_parts_lie_inside_their_pieces_and_never_overlap() -> None:
    layout = RowLayout.of(preset("minimax-m3"), NVFP4, FP8, tp_size=2)
    pieces = {name: (start, start + size) for name, start, size in layout.pieces()}
    taken: list[tuple[int, int]] = []
    for layer in range(layout.num_layers):
        for head in range(layout.num_kv_heads):
            start, end = pieces[f"kv.{head}.{layer}"]
            for part in (layout.key(layer, head), layout.value(layer, head)):
                assert start <= part.codes < part.scales
                assert part.codes + part.nbytes <= end
                taken.append((part.codes, part.codes + part.nbytes))
        if layer in layout.sparse_layers:
            part = layout.index(layer)
            assert pieces[f"index.{layer}"] == (part.codes, part.codes + part.nbytes)
            taken.append((part.codes, part.codes + part.nbytes))
    taken.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(taken))


def test_a_tensor_parallel_rank_owns_a_contiguous_piece_of_the_whole_row() -> None:
    whole = RowLayout.of(FLASH, NVFP4, NVFP4)
    rank = RowLayout.of(FLASH, NVFP4, NVFP4, tp_size=4)
    assert whole.index_bytes == rank.index_bytes
    for head in range(4):
        start = whole.index_bytes + head * whole.head_bytes
        assert whole.key(0, head).codes == start
        assert whole.value(59, head).scales - start == rank.value(59, 0).scales - rank.index_bytes


def test_what_has_no_place_in_the_row_is_an_error() -> None:
    layout = RowLayout.of(preset("minimax-m3"), NVFP4, NVFP4)
    with pytest.raises(ValueError, match="not in tuple"):
        layout.index(0)
    with pytest.raises(ValueError, match="no layer 60"):
        layout.key(60, 0)
    with pytest.raises(UnsupportedError, match="3 tensor-parallel ranks"):
        RowLayout.of(FLASH, NVFP4, NVFP4, tp_size=3)
    with pytest.raises(ValueError, match="unknown cache format 'int8'"):
        cache_format("int8", BF16)
    with pytest.raises(ValueError, match="do not fill nvfp4 groups"):
        NVFP4.nbytes(24)
