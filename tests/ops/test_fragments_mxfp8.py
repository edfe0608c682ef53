"""The packed layout of MXFP8 weights: as it is documented, in place, and losing nothing."""

from __future__ import annotations

import pytest
import torch

from winnow.ops.codec import reference as codec
from winnow.ops.fragments_mxfp8 import (
    MAX_WOVEN_SCALE,
    PackedMxfp8Weight,
    pack,
    packable,
    unpack,
    weave,
)


def some(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    *stack, rows, columns = shape
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    scales = torch.randint(
        256, (*stack, rows, columns // 32), dtype=torch.uint8, generator=generator
    )
    return codes, scales


@pytest.mark.parametrize("shape", [(16, 128), (48, 384), (3, 32, 256), (2, 2, 16, 640)])
def test_packing_and_unpacking_give_the_same_bytes(shape: tuple[int, ...]) -> None:
    codes, scales = some(*shape)
    packed = pack(codes.clone().view(torch.float8_e4m3fn), scales.clone())
    assert packed.shape == shape
    back, back_scales = unpack(packed)
    assert torch.equal(back.view(torch.uint8), codes)
    assert torch.equal(back_scales, scales)


@pytest.mark.parametrize("shape", [(16, 128), (3, 32, 256)])
def test_weaving_and_unpacking_give_the_same_bytes(shape: tuple[int, ...]) -> None:
    codes, scales = some(*shape)
    scales = scales.where(scales <= MAX_WOVEN_SCALE, 255)
    woven = weave(pack(codes.clone(), scales.clone()))
    assert woven.shape == shape
    back, back_scales = unpack(woven)
    assert torch.equal(back.view(torch.uint8), codes)
    assert torch.equal(back_scales, scales)


def test_weaving_uses_the_memory_that_it_is_given() -> None:
    packed = pack(*some(16, 256))
    woven = weave(packed)
    assert woven.codes.data_ptr() == packed.codes.data_ptr()
    assert woven.scales.data_ptr() == packed.scales.data_ptr()


def test_a_woven_word_gives_two_pairs_of_bf16_by_the_instructions_named() -> None:
    """Each is its code times 2^-120, whatever the codes beside it."""
    codes = torch.arange(256).repeat_interleave(256).to(torch.uint8)
    words = torch.stack([codes, codes.flip(0), codes.roll(77), codes.view(256, 256).T.flatten()], 1)
    packed = PackedMxfp8Weight(
        words.view(16, 8, 2048).clone(), torch.zeros(16, 8, 64, dtype=torch.uint8)
    )
    w = weave(packed).codes.view(torch.int32).flatten().long() & 0xFFFFFFFF
    pairs = torch.stack([w & 0x87F087F0, (w << 4 ^ w >> 4) & 0x87F087F0], 1)
    halves = torch.stack([pairs & 0xFFFF, pairs >> 16], 2).view(-1, 4)
    values = (halves << 16).to(torch.int64)
    got = torch.where(values >= 1 << 31, values - (1 << 32), values).int().view(torch.float32)
    want = words.view(torch.float8_e4m3fn).float()
    number = ~want.isnan()
    assert torch.equal((got * 2.0**120)[number], want[number])


def test_a_woven_scale_byte_is_the_exponent_of_its_factor() -> None:
    scales = torch.tensor([0, 1, 127, MAX_WOVEN_SCALE], dtype=torch.uint8).repeat(16)
    packed = PackedMxfp8Weight(
        torch.zeros(1, 1, 2048, dtype=torch.uint8), scales.clone().view(1, 1, 64)
    )
    factors = (weave(packed).scales.flatten().int() << 23).view(torch.float32)
    assert torch.equal(factors, torch.exp2(scales.float() - 39))


def test_packing_uses_the_memory_that_it_is_given() -> None:
    codes, scales = some(32, 256)
    packed = pack(codes, scales)
    assert packed.codes.data_ptr() == codes.data_ptr()
    assert packed.scales.data_ptr() == scales.data_ptr()


def test_a_lane_holds_what_the_tensor_core_takes_from_it() -> None:
    """Registers A0 .. A3 of m16n8k16: rows g, g + 8, g, g + 8 at columns 2t, 2t, 2t + 8, 2t + 8."""
    codes, scales = some(48, 384)
    packed = pack(codes.clone(), scales.clone())
    for strip in range(3):
        for piece in range(3):
            lanes = packed.codes[strip, piece].view(4, 32, 2, 4, 2)
            own_scales = packed.scales[strip, piece].view(8, 2, 4)
            for tile in range(4):
                for lane in range(32):
                    g, t = divmod(lane, 4)
                    for step in range(2):
                        for register in range(4):
                            row = 16 * strip + g + 8 * (register % 2)
                            column = 128 * piece + 32 * tile + 16 * step
                            column += 8 * (register // 2) + 2 * t
                            want = codes[row, column : column + 2]
                            assert torch.equal(lanes[tile, lane, step, register], want)
                    for half in range(2):
                        want = scales[16 * strip + g + 8 * half, 4 * piece + tile]
                        assert own_scales[g, half, tile] == want


def test_the_fragments_multiplied_as_the_tensor_core_does_give_the_product() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(n, 256, generator=generator) for n in (32, 8))
    codes, scales = codec.quantise_mxfp8(weight)
    want = x @ codec.dequantise_mxfp8(codes, scales).T
    packed = pack(codes.clone(), scales.clone())
    out = torch.zeros(8, 32)
    for strip in range(2):
        for piece in range(2):
            lanes = packed.codes[strip, piece].view(torch.float8_e4m3fn).float()
            lanes = lanes.view(4, 8, 4, 2, 2, 2, 2)  # tile, g, t, step, half of K, half of rows
            rows = lanes.permute(5, 1, 0, 3, 4, 2, 6).reshape(16, 4, 32)
            own = codec.decode_e8m0(packed.scales[strip, piece]).view(8, 2, 4)
            part = x[:, 128 * piece : 128 * (piece + 1)].view(8, 4, 32)
            sums = torch.einsum("rik,nik->nri", rows, part)
            scale = own.transpose(0, 1).reshape(16, 4)
            out[:, 16 * strip : 16 * (strip + 1)] += (sums * scale).sum(-1)
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-5)


def test_what_has_no_whole_strips_is_refused() -> None:
    assert packable(16, 128)
    assert not packable(24, 128)
    assert not packable(16, 96)
    with pytest.raises(ValueError, match="24 x 128"):
        pack(*some(24, 128))
    codes, scales = some(16, 256)
    with pytest.raises(ValueError, match="contiguous"):
        pack(codes[:, :128], scales[:, :4].contiguous())


def test_a_packed_weight_knows_its_shape() -> None:
    assert PackedMxfp8Weight(*(torch.empty(5, 2, 3, n) for n in (2048, 64))).shape == (5, 32, 384)
