"""E2M1, E4M3 and E8M0, every code and every rounding, against searches over exact fractions."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from winnow.ops.codec import (
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    pack_e2m1,
    unpack_e2m1,
)

BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def decoded(code: int, exponent_bits: int, mantissa_bits: int) -> Fraction:
    """The magnitude of a code, from the definition of a small float with bias 2^(e-1) - 1."""
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = Fraction(code & (2**mantissa_bits - 1), 2**mantissa_bits)
    if exponent == 0:
        return Fraction(mantissa * Fraction(2) ** (1 - bias))
    return Fraction((1 + mantissa) * Fraction(2) ** (exponent - bias))


E2M1 = [decoded(code, 2, 1) for code in range(8)]
E4M3 = [decoded(code, 4, 3) for code in range(127)]


def nearest_even(x: Fraction, magnitudes: list[Fraction]) -> int:
    """The code whose magnitude is nearest to |x|, the even code of two at the same distance."""
    return min(range(len(magnitudes)), key=lambda c: (abs(magnitudes[c] - abs(x)), c % 2))


def nearest_even_of_all(x: Tensor, magnitudes: list[Fraction]) -> Tensor:
    """The same search over float64, where the distance to a neighbouring value is exact."""
    values = torch.tensor([float(m) for m in magnitudes], dtype=torch.float64)
    distances = (x.double().abs().unsqueeze(-1).clamp(max=1e6) - values).abs()
    at_minimum = distances == distances.amin(-1, keepdim=True)
    order = torch.arange(len(magnitudes)) % 2 + 1
    return torch.where(at_minimum, order, 3).argmin(-1).to(torch.uint8)


def edges(magnitudes: list[Fraction]) -> list[float]:
    """Every value, every midpoint and the fp32 neighbours of both, of both signs."""
    points = {float(m) for m in magnitudes}
    points |= {float((a + b) / 2) for a, b in pairwise(magnitudes)}
    middle = torch.tensor(sorted(points))
    up, down = middle.nextafter(torch.tensor(math.inf)), middle.nextafter(torch.tensor(-math.inf))
    return torch.cat((middle, up, down, -middle, -up, -down)).tolist()


def signed(code: int, x: float, sign_bit: int) -> int:
    return code | (sign_bit if math.copysign(1.0, x) < 0 else 0)


def test_e2m1_codes_have_the_values_of_the_definition() -> None:
    values = decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist()
    assert values == [float(m) for m in E2M1] + [-float(m) for m in E2M1]
    assert [math.copysign(1.0, v) for v in values] == [1.0] * 8 + [-1.0] * 8


def test_a_code_above_15_is_refused() -> None:
    with pytest.raises(IndexError):
        decode_e2m1(torch.tensor([16], dtype=torch.uint8))


@pytest.mark.parametrize(
    ("encode", "magnitudes", "sign_bit"),
    [(encode_e2m1, E2M1, 8), (encode_e4m3, E4M3, 128)],
    ids=["e2m1", "e4m3"],
)
class TestRounding:
    def test_every_midpoint_and_its_neighbours_round_to_nearest_even(
        self, encode: Callable[[Tensor], Tensor], magnitudes: list[Fraction], sign_bit: int
    ) -> None:
        points = edges(magnitudes)
        want = [signed(nearest_even(Fraction(x), magnitudes), x, sign_bit) for x in points]
        assert encode(torch.tensor(points)).view(torch.uint8).tolist() == want
        # One at a time too: a vector's tail takes another path through torch's casts.
        assert [int(encode(torch.tensor([x])).view(torch.uint8)) for x in points] == want

    def test_every_bf16_rounds_to_nearest_even(
        self, encode: Callable[[Tensor], Tensor], magnitudes: list[Fraction], sign_bit: int
    ) -> None:
        x = ALL_BF16[~ALL_BF16.isnan()]
        want = nearest_even_of_all(x, magnitudes) + sign_bit * x.signbit().to(torch.uint8)
        assert torch.equal(encode(x).view(torch.uint8), want)
        assert torch.equal(encode(x.float()).view(torch.uint8), want)

    def test_every_fp16_rounds_to_nearest_even(
        self, encode: Callable[[Tensor], Tensor], magnitudes: list[Fraction], sign_bit: int
    ) -> None:
        x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
        x = x[~x.isnan()]
        want = nearest_even_of_all(x, magnitudes) + sign_bit * x.signbit().to(torch.uint8)
        assert torch.equal(encode(x).view(torch.uint8), want)

    def test_random_fp32_bits_round_to_nearest_even(
        self, encode: Callable[[Tensor], Tensor], magnitudes: list[Fraction], sign_bit: int
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        # Exponents from 2^-27 to 2^12: all that can be near a code of either format.
        exponents = torch.randint(100, 140, (20_000,), generator=generator) << 23
        rest = torch.randint(0, 1 << 23, (20_000,), generator=generator)
        signs = torch.randint(-1, 1, (20_000,), generator=generator) << 31
        x = (exponents | rest | signs).to(torch.int32).view(torch.float32)
        want = nearest_even_of_all(x, magnitudes) + sign_bit * x.signbit().to(torch.uint8)
        assert torch.equal(encode(x).view(torch.uint8), want)

    def test_what_is_too_large_saturates_and_keeps_its_sign(
        self, encode: Callable[[Tensor], Tensor], magnitudes: list[Fraction], sign_bit: int
    ) -> None:
        top = float(magnitudes[-1])
        large = torch.tensor([top, top * 1.04, top * 1.2, 1e9, 3.4e38, math.inf])
        last = len(magnitudes) - 1
        assert encode(large).view(torch.uint8).tolist() == [last] * 6
        assert encode(-large).view(torch.uint8).tolist() == [last | sign_bit] * 6

    def test_zeros_and_results_of_zero_keep_their_sign(
        self, encode: Callable[[Tensor], Tensor], magnitudes: list[Fraction], sign_bit: int
    ) -> None:
        tie = float(magnitudes[1]) / 2
        small = torch.tensor([0.0, 1e-45, 1e-38, tie])
        assert encode(small).view(torch.uint8).tolist() == [0] * 4
        assert encode(-small).view(torch.uint8).tolist() == [sign_bit] * 4

    def test_fp64_is_refused_since_it_would_round_twice(
        self, encode: Callable[[Tensor], Tensor], magnitudes: list[Fraction], sign_bit: int
    ) -> None:
        with pytest.raises(TypeError, match="float64: convert it to one of float32, bfloat16"):
            encode(torch.ones(2, dtype=torch.float64))


def nan_of_both_signs() -> Tensor:
    return torch.tensor(
        [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, -0x400000], dtype=torch.int32
    ).view(torch.float32)


def test_e2m1_makes_nan_of_either_sign_plus_six() -> None:
    assert encode_e2m1(nan_of_both_signs()).tolist() == [7] * 5


def test_e4m3_keeps_nan_as_one_byte_whatever_its_sign() -> None:
    assert encode_e4m3(nan_of_both_signs()).view(torch.uint8).tolist() == [0x7F] * 5
    assert encode_e4m3(nan_of_both_signs()[-1:]).view(torch.uint8).tolist() == [0x7F]


def test_packing_puts_the_even_element_in_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_e2m1(codes).tolist() == [[0x21, 0x0F]]


def test_unpacking_and_packing_are_inverse_on_all_bytes() -> None:
    unpacked = unpack_e2m1(BYTES.view(16, 16))
    assert unpacked.shape == (16, 32)
    assert int(unpacked.max()) == 15
    assert torch.equal(pack_e2m1(unpacked), BYTES.view(16, 16))


def test_packing_takes_strided_and_empty_codes() -> None:
    codes = torch.randint(0, 16, (6, 10), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    assert torch.equal(pack_e2m1(codes.T), pack_e2m1(codes.T.contiguous()))
    assert torch.equal(unpack_e2m1(pack_e2m1(codes.T)), codes.T)
    assert pack_e2m1(codes[:0]).shape == (0, 5)


def test_an_odd_number_of_codes_is_refused() -> None:
    with pytest.raises(ValueError, match="5 codes do not fill whole bytes"):
        pack_e2m1(torch.zeros(2, 5, dtype=torch.uint8))


def test_e4m3_codes_have_the_values_of_the_definition() -> None:
    values = BYTES.view(torch.float8_e4m3fn).float().tolist()
    for sign, half in ((1, values[:128]), (-1, values[128:])):
        assert half[:127] == [sign * float(m) for m in E4M3]
        assert math.isnan(half[127])
    assert max(E4M3) == 448


def test_every_e4m3_code_survives_decoding_and_encoding() -> None:
    finite = BYTES[(BYTES & 0x7F) != 0x7F]
    assert torch.equal(
        encode_e4m3(finite.view(torch.float8_e4m3fn).float()).view(torch.uint8), finite
    )


def test_an_e2m1_code_moves_its_bits_to_become_an_e4m3_of_a_64th() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    moved = ((codes & 8) << 4) | ((codes & 7) << 2)
    values = moved.view(torch.float8_e4m3fn).float()
    assert torch.equal(values.view(torch.int32), (decode_e2m1(codes) / 64).view(torch.int32))


def test_every_product_of_e2m1_and_e4m3_is_exact_in_bf16_and_fp16_but_not_in_e4m3() -> None:
    elements = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    scales = BYTES[(BYTES & 0x7F) != 0x7F].view(torch.float8_e4m3fn).float()
    exact = elements.double().unsqueeze(-1) * scales.double()
    products = elements.unsqueeze(-1) * scales
    assert torch.equal(products.double(), exact)
    assert torch.equal(products.bfloat16().double(), exact)
    assert torch.equal(products.half().double(), exact)
    assert not torch.equal(products.to(torch.float8_e4m3fn).double(), exact)


def test_every_e8m0_code_is_a_power_of_two_and_255_is_nan() -> None:
    values = decode_e8m0(BYTES).tolist()
    assert values[:255] == [2.0 ** (s - 127) for s in range(255)]
    assert math.isnan(values[255])


def least_e8m0(amax: float) -> int:
    """The least code whose scale brings `amax` to 448 or below."""
    return next(s for s in range(255) if Fraction(amax) <= 448 * Fraction(2) ** (s - 127))


def test_e8m0_is_the_least_scale_under_which_amax_fits_e4m3() -> None:
    significands = torch.tensor([1.0, 1.5, 1.75, 1.875])
    exponents = torch.tensor(
        [2.0**e for e in (*range(-126, -116), *range(-12, 13), *range(120, 128))]
    )
    points = (significands.unsqueeze(-1) * exponents).flatten()
    up, down = points.nextafter(torch.tensor(math.inf)), points.nextafter(torch.tensor(0.0))
    amax = torch.cat((points, up[up.isfinite()], down, torch.tensor([1e-45, 1e-40])))
    assert encode_e8m0(amax).tolist() == [least_e8m0(x) for x in amax.tolist()]


def test_e8m0_of_every_exponent_splits_at_a_significand_of_1_75() -> None:
    exponents = torch.arange(-118, 128)
    powers = torch.tensor([2.0**e for e in exponents.tolist()])
    edge = powers * 1.75
    beyond = edge.nextafter(torch.tensor(math.inf))
    # 2^e fits under 2^(e - 8) = code e - 8 + 127.
    assert torch.equal(encode_e8m0(powers).int(), exponents.int() + 119)
    assert torch.equal(encode_e8m0(edge).int(), exponents.int() + 119)
    assert torch.equal(encode_e8m0(beyond).int(), exponents.int() + 120)


def test_e8m0_of_zero_inf_and_nan_is_what_the_contract_says() -> None:
    amax = torch.tensor([0.0, math.inf, torch.finfo(torch.float32).max, math.nan])
    assert encode_e8m0(amax).tolist() == [0, 247, 247, 255]
