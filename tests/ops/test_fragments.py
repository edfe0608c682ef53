"""The order of packed NVFP4 weights: what each lane reads becomes the fragment it should hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from winnow.ops import fragments
from winnow.ops.codec import reference as codec
from winnow.ops.codec.elements import decode_e2m1
from winnow.ops.weights import Nvfp4Weight

ROWS, COLUMNS = 48, 192


def weight(*stack: int) -> Nvfp4Weight:
    """Every byte random, NaN scales included."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    return Nvfp4Weight(
        random(*stack, ROWS, COLUMNS // 2),
        random(*stack, ROWS, COLUMNS // 16).view(torch.float8_e4m3fn),
        torch.rand(*stack, ROWS, generator=generator),
    )


def registers(words: np.ndarray) -> np.ndarray:
    """The kernels' unpacking, before scales: fp16 pairs [..., register, 2] of words [...]."""
    mask = np.uint32(fragments.MASK)
    moved = (
        words,
        words << np.uint32(3),
        (words & np.uint32(0x40384038)) * np.uint32(66),
        (words & np.uint32(0x20072007)) * np.uint32(516),
    )
    return np.stack([m & mask for m in moved], -1)[..., None].view(np.float16)


def test_unpacking_restores_every_byte() -> None:
    given, copy = weight(2, 3), weight(2, 3)
    packed = fragments.pack(copy)
    assert packed.codes.data_ptr() == copy.codes.data_ptr()
    back = fragments.unpack(packed)
    assert torch.equal(back.codes, given.codes)
    assert torch.equal(back.scales.view(torch.uint8), given.scales.view(torch.uint8))
    assert torch.equal(back.global_scales, given.global_scales)


def test_each_lane_holds_its_part_of_the_fragment() -> None:
    given = weight()
    packed = fragments.pack(weight())
    words = packed.codes.numpy().reshape(-1).view(np.uint32)
    held = registers(words.reshape(ROWS // 16, COLUMNS // 64, 8, 4, 4)) / fragments.CODE_SCALE
    scales = torch.ones(ROWS, COLUMNS // 16).to(torch.float8_e4m3fn)
    values = codec.dequantise_nvfp4(given.codes, scales).numpy()
    # Axes: strip, row half, g | tile, fragment, column half, t, low.
    split = values.reshape(ROWS // 16, 2, 8, COLUMNS // 64, 4, 2, 4, 2)
    wanted = split.transpose(0, 3, 2, 6, 4, 5, 1, 7).reshape(held.shape)
    assert np.array_equal(held, wanted)


def test_a_lane_reads_its_rows_scales_in_one_piece() -> None:
    given = weight()
    packed = fragments.pack(weight()).scales.view(torch.uint8).reshape(-1, 8, 2, 4)
    for strip in range(ROWS // 16):
        for tile in range(COLUMNS // 64):
            for g in range(8):
                rows = given.scales.view(torch.uint8)[16 * strip + g : 16 * strip + g + 9 : 8]
                there = packed[strip * (COLUMNS // 64) + tile, g]
                assert torch.equal(there, rows[:, 4 * tile : 4 * tile + 4])


def test_every_word_unpacks_without_carries() -> None:
    generator = np.random.default_rng(0)
    words = generator.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    packed = torch.from_numpy(words.view(np.uint8)).reshape(16, -1)
    codes = fragments.unpack_codes(packed)
    low = decode_e2m1(codes.reshape(-1) & 15).numpy()
    # The same codes in other places: compare what stands where through the inverse permutation.
    again = fragments.pack_codes(codes).numpy().view(np.uint32)
    assert np.array_equal(again, words)
    assert set(np.unique(registers(words)) / fragments.CODE_SCALE) == set(np.unique(low))


def test_a_code_times_any_scale_is_exact_in_fp16() -> None:
    codes = decode_e2m1(torch.arange(16, dtype=torch.uint8)).double()
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    products = codes[:, None] * fragments.CODE_SCALE * scales
    finite = products[products.isfinite()]
    assert torch.equal(finite.half().double(), finite)


@pytest.mark.parametrize("shape", [(24, 64), (16, 96)])
def test_a_matrix_of_broken_tiles_is_refused(shape: tuple[int, int]) -> None:
    rows, columns = shape
    codes = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    scales = torch.zeros(rows, columns // 16).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="tiles"):
        fragments.pack(Nvfp4Weight(codes, scales, torch.ones(rows)))
