"""Memory arithmetic: equal to the byte to what is held, and to the published numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints import KINDS, build

from winnow.errors import CapacityError
from winnow.model.checkpoint import load_checkpoint, read_spec
from winnow.model.weights import nbytes
from winnow.spec.formats import BF16, FP8, FP32, MXFP8, NVFP4, Format
from winnow.spec.memory import PARTS, bytes_per_token, matrix_bytes, plan_memory, weight_bytes
from winnow.spec.page import RowLayout
from winnow.spec.presets import preset

M31 = preset("minimax-m3.1-flash")

# Experts, other linears, index projections; None is the compute dtype.
FORMATS: dict[str, tuple[Format | None, Format | None, Format | None]] = {
    "hub": (None, None, None),
    "hub-prefixed": (None, None, None),
    "transformers-text": (None, None, None),
    "mxfp8": (MXFP8, MXFP8, MXFP8),
    "mxfp8-e8m0": (MXFP8, MXFP8, MXFP8),
    "mxfp8-plain-index": (MXFP8, MXFP8, None),
    "modelopt-nvfp4": (NVFP4, None, None),
    "mixed-nvfp4": (NVFP4, MXFP8, MXFP8),
}


@pytest.mark.parametrize(("dtype", "plain"), [(torch.float32, FP32), (torch.bfloat16, BF16)])
@pytest.mark.parametrize("kind", KINDS)
def test_predicted_weights_equal_the_held_ones_to_the_byte(
    tmp_path: Path, kind: str, dtype: torch.dtype, plain: Format
) -> None:
    build(tmp_path, kind)
    spec = read_spec(tmp_path)
    held = nbytes(load_checkpoint(tmp_path, spec, dtype, progress=False))
    experts, linear, index = (f or plain for f in FORMATS[kind])
    assert weight_bytes(spec, experts, linear, plain, index) == held
    assert tuple(held) == PARTS
    assert all(held.values())


def test_a_tied_head_takes_no_bytes(tmp_path: Path) -> None:
    build(tmp_path, "hub", drop=("lm_head.weight",), tie_word_embeddings=True)
    spec = read_spec(tmp_path)
    held = nbytes(load_checkpoint(tmp_path, spec, torch.bfloat16, progress=False))
    assert held == weight_bytes(spec, BF16, BF16, BF16)
    assert held["head"] == 0 < held["embedding"]


def test_nvfp4_matrices_hold_a_global_scale_a_row() -> None:
    assert matrix_bytes(NVFP4, 6, 32) == 6 * 16 + 6 * 2 + 6 * 4
    assert matrix_bytes(MXFP8, 6, 32) == 6 * 32 + 6
    assert matrix_bytes(BF16, 6, 32) == 6 * 64


def test_cache_bytes_per_token_are_the_published_ones() -> None:
    fp8 = bytes_per_token(RowLayout.of(M31, FP8, FP8))
    nvfp4 = bytes_per_token(RowLayout.of(M31, NVFP4, NVFP4))
    assert (fp8.kv, fp8.index) == (61_440, 7_680)
    assert (nvfp4.kv, nvfp4.index) == (34_560, 4_320)
    assert nvfp4.total == 34_560 + 4_320
    layout = RowLayout.of(M31, NVFP4, NVFP4, tp_size=4, draft_layers=5)
    assert bytes_per_token(layout).total * 128 == layout.row_bytes == 1_822_720


def test_a_plan_fills_the_usable_memory_to_less_than_a_page() -> None:
    plan = plan_memory(1_000_000, 300_000, 4096, 0.8, reserve=100_000)
    left = plan.usable_bytes - plan.weight_bytes - plan.reserve_bytes - plan.cache_bytes
    assert 0 <= left < 4096
    assert plan.usable_bytes == 800_000
    assert plan.num_pages == 97
    assert plan.num_tokens == 96 * 128
    assert plan.num_sequences(129) == 48


def test_a_plan_without_room_for_a_request_is_refused_with_numbers() -> None:
    assert plan_memory(10**9 + 2000, 10**9, 1000, 1.0).num_pages == 2
    with pytest.raises(
        CapacityError, match=r"needs 1\.000 GB .* two pages of 1000 B.*fewer layers"
    ):
        plan_memory(10**9 + 1999, 10**9, 1000, 1.0)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, float("nan")])
def test_a_memory_fraction_outside_zero_to_one_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="memory_fraction"):
        plan_memory(10**9, 0, 1000, fraction)
