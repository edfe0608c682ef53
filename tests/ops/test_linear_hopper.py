"""Hopper's MXFP8 products: what they promise on any machine, and against the reference on a GPU."""

from __future__ import annotations

import pytest
import torch

from winnow.errors import UnsupportedError
from winnow.ops.case import Case, error, judge
from winnow.ops.codec import reference as codec
from winnow.ops.cuda_build import build, compiler
from winnow.ops.fragments_mxfp8 import PackedMxfp8Weight, unpack
from winnow.ops.linear import division, hopper
from winnow.ops.linear.cases import CASES
from winnow.ops.linear.reference import dequantise
from winnow.ops.linear.reference import linear as reference
from winnow.ops.weights import Mxfp8Weight, PlainWeight

needs_nvcc = pytest.mark.skipif(compiler() is None, reason="nvcc is not installed")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="there is no Hopper GPU",
)
WIDTHS = (
    (6144, 6144),
    (6144, 8192),
    (9216, 6144),
    (6144, 3072),
    (384, 384),
    (384, 256),
    (640, 6144),
)


def weight(n: int, k: int) -> Mxfp8Weight:
    generator = torch.Generator().manual_seed(n + k)
    return Mxfp8Weight(*codec.quantise_mxfp8(torch.randn(n, k, generator=generator) * k**-0.5))


@needs_nvcc
@pytest.mark.parametrize("source", [hopper.SLICES, hopper.RANGES, hopper.EXPAND])
def test_the_kernels_compile(source: object) -> None:
    assert build(source).stat().st_size > 0  # type: ignore[arg-type]


@needs_nvcc
def test_the_libraries_have_the_functions_that_are_called() -> None:
    assert all(made() is not None for made in (hopper._slicer, hopper._ranger, hopper._expander))


either_form = pytest.mark.parametrize("woven", [False, True])


@either_form
def test_a_packed_weight_means_what_it_meant(woven: bool) -> None:
    standard = weight(48, 256)
    want = dequantise(standard, torch.bfloat16)
    packed = hopper.prepare(standard, woven=woven)
    assert isinstance(packed, PackedMxfp8Weight)
    assert torch.equal(dequantise(packed, torch.bfloat16), want)


def test_a_scale_of_nan_is_put_into_the_codes() -> None:
    standard = weight(16, 128)
    standard.scales[3, 1] = 255
    packed = hopper.prepare(standard)
    values = dequantise(packed, torch.float32)
    assert values[3, 32:64].isnan().all()
    assert int(values.isnan().sum()) == 32
    assert isinstance(packed, PackedMxfp8Weight)
    assert int(packed.codes.view(torch.float8_e4m3fn).float().isnan().sum()) == 32


def test_what_cannot_be_packed_stays_as_it_is() -> None:
    for other in (weight(24, 128), weight(16, 96), PlainWeight(torch.zeros(16, 128))):
        assert hopper.prepare(other) is other


@either_form
def test_a_code_of_nan_is_put_into_the_scales(woven: bool) -> None:
    standard = weight(16, 128)
    standard.codes.view(torch.uint8)[5, 70] = 0xFF
    packed = hopper.prepare(standard, woven=woven)
    assert isinstance(packed, PackedMxfp8Weight)
    assert int((packed.scales == 255).sum()) == 1
    assert dequantise(packed, torch.float32)[5, 64:96].isnan().all()


def test_woven_codes_are_zero_where_the_scale_is_nan() -> None:
    standard = weight(16, 128)
    standard.codes.view(torch.uint8)[5, 70] = 0xFF
    standard.scales[3, 1] = 255
    packed = hopper.prepare(standard, woven=True)
    assert isinstance(packed, PackedMxfp8Weight)
    codes, _ = unpack(packed)
    zero = codes.view(torch.uint8) == 0
    assert zero[5, 64:96].all()
    assert zero[3, 32:64].all()
    assert dequantise(packed, torch.float32)[3, 32:64].isnan().all()


def test_scales_beyond_what_is_multiplied_are_refused() -> None:
    standard = weight(16, 128)
    standard.scales[0, 0] = hopper.MAX_SCALE
    assert isinstance(hopper.prepare(standard), PackedMxfp8Weight)
    standard = weight(16, 128)
    standard.scales[0, 0] = hopper.MAX_SCALE + 1
    with pytest.raises(UnsupportedError, match="larger"):
        hopper.prepare(standard)


H200 = (132, 66, 39, 30)
"""Clusters of 1, 2, ... CTAs that one holds at once."""


@pytest.mark.parametrize(("n", "k"), [*WIDTHS, (16, 128), (12288 * 2, 6144)])
def test_slices_give_every_warp_at_most_one_strip_and_every_cta_some(n: int, k: int) -> None:
    strips, pieces = n // 16, k // 128
    chosen = division.slicing(strips, pieces, H200)
    assert chosen.slices <= pieces
    assert chosen.clusters <= H200[chosen.slices - 1]
    assert chosen.clusters <= chosen.tiles <= strips <= 16 * chosen.tiles


def test_slices_leave_no_cta_much_more_than_its_share() -> None:
    for n, k in WIDTHS[:4]:
        strips, pieces = n // 16, k // 128
        chosen = division.slicing(strips, pieces, H200)
        most = -(-strips // chosen.tiles) * -(-pieces // chosen.slices)
        assert chosen.tiles == chosen.clusters
        assert most < 1.2 * strips * pieces / H200[0]


def test_slices_need_a_cluster_of_that_size() -> None:
    assert division.slicing(616, 48, (0, 66)) == division.Slicing(slices=2, tiles=66, clusters=66)


@pytest.mark.parametrize("rows", range(65, 1025, 37))
def test_rows_are_multiplied_in_tiles_that_leave_little_empty(rows: int) -> None:
    columns = division.ranged_columns(rows)
    assert -(-rows // columns) * columns - rows <= max(64, rows // 3)


def test_tiles_are_split_where_they_do_not_divide_evenly() -> None:
    assert not division.Ranging(264, 48, 132).splits_tiles()
    assert division.Ranging(265, 48, 132).splits_tiles()
    assert not division.Ranging(1, 1, 1).splits_tiles()


@pytest.mark.parametrize("pieces", [24, 48, 64])
@pytest.mark.parametrize("tiles", [33, 48, 65, 66, 77, 96, 131, 154, 231, 308])
def test_ranges_leave_no_cta_much_more_than_its_share(tiles: int, pieces: int) -> None:
    chosen = division.ranging(tiles, pieces, H200[0], H200[1])
    own = chosen.tiles // chosen.ctas * pieces
    ranges = -(-chosen.left * (chosen.rest or pieces) // chosen.members) if chosen.left else 0
    second = chosen.held - chosen.cut
    if not chosen.rest:
        second += ranges
    assert 0 <= chosen.cut < max(chosen.held, 1) <= pieces
    assert own + max(chosen.cut, second, ranges) < tiles * pieces / H200[0] + 4


def test_two_ctas_have_a_tile_together_where_all_can_or_every_tile_is_theirs() -> None:
    assert division.ranging(77, 48, 132, 66) == division.Ranging(77, 48, 132, held=48, cut=29)
    assert division.ranging(48, 64, 132, 66) == division.Ranging(48, 64, 132, held=48, cut=24)
    assert division.ranging(154, 48, 132, 66) == division.Ranging(154, 48, 132)


def test_no_two_ctas_have_a_tile_together_on_a_device_that_does_not_hold_them_all() -> None:
    assert division.ranging(77, 48, 132, 65) == division.Ranging(77, 48, 132)


def test_only_bf16_rows_and_mxfp8_in_whole_strips_are_taken() -> None:
    x = torch.zeros(3, 128, dtype=torch.bfloat16)
    assert hopper.takes(x, weight(16, 128))
    assert hopper.takes(x, hopper.prepare(weight(16, 128)))
    assert not hopper.takes(x.float(), weight(16, 128))
    assert not hopper.takes(x, weight(24, 128))
    assert not hopper.takes(x, PlainWeight(torch.zeros(16, 128)))
    with pytest.raises(UnsupportedError, match="float32 by Mxfp8Weight"):
        hopper.linear(x.float(), weight(16, 128))


def test_rows_of_another_length_than_the_weights_are_not_multiplied() -> None:
    x = torch.zeros(3, 256, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="differ in K"):
        hopper.linear(x, hopper.prepare(weight(16, 128)))


SERVED = [c for c in CASES if "mxfp8" in c.name and "bf16" in c.name and "x96" not in c.name]


@needs_hopper
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_every_case_that_is_taken_agrees_with_the_reference(case: Case) -> None:
    assert all(v.passed for v in judge(case, hopper.linear, reference, "cuda"))


@needs_hopper
@pytest.mark.parametrize(("n", "k"), WIDTHS)
@pytest.mark.parametrize("rows", [1, 8, 13, 31, 40, 64, 80, 100, 170, 256, 300, 900, 1100])
@either_form
def test_real_widths_agree_and_repeat_to_the_bit(woven: bool, rows: int, n: int, k: int) -> None:
    packed = hopper.prepare(large_weight(n, k), woven=woven)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    x[0] *= 2.0**-30
    got = hopper.linear(x, packed)
    want = (x.float() @ dequantise(packed, torch.bfloat16).float().T).bfloat16()
    assert max(error(got[:1], want[:1]), error(got[1:], want[1:])) < 2.0**-8
    assert torch.equal(got, hopper.linear(x, packed))


@needs_hopper
@pytest.mark.parametrize("rows", [1, 9, 64])
def test_clusters_that_take_tiles_in_turn_add_each_of_them(rows: int) -> None:
    n, k = 35200, 768
    chosen = division.slicing(n // 16, k // 128, H200)
    assert chosen.slices > 1
    assert chosen.tiles > 2 * chosen.clusters
    packed = hopper.prepare(large_weight(n, k), woven=True)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    got = hopper.linear(x, packed)
    want = (x.float() @ dequantise(packed, torch.bfloat16).float().T).bfloat16()
    assert error(got, want) < 2.0**-8
    assert torch.equal(got, hopper.linear(x, packed))


# Tiles of 128 columns by 256 or 192 rows, where the device holds 132 CTAs: with whole tiles before
# (199), with pairs alone (66), with rests of tiles (34, 48), with fewer pieces than CTAs (67, 133).
@needs_hopper
@pytest.mark.parametrize(
    ("n", "k", "rows"),
    [
        (25392, 768, 250), (8448, 384, 256), (4352, 512, 256), (6144, 768, 190), (6000, 640, 130),
        (8464, 640, 256), (17024, 768, 250), (9856, 6144, 256), (9856, 6144, 700),
    ],
)  # fmt: skip
@either_form
def test_tiles_that_several_ctas_have_agree_and_repeat_to_the_bit(
    woven: bool, n: int, k: int, rows: int
) -> None:
    packed = hopper.prepare(large_weight(n, k), woven=woven)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    got = hopper.linear(x, packed)
    want = (x.float() @ dequantise(packed, torch.bfloat16).float().T).bfloat16()
    assert error(got, want) < 2.0**-8
    for _ in range(10):
        assert torch.equal(got, hopper.linear(x, packed))


@needs_hopper
@pytest.mark.parametrize("rows", [1, 30, 64, 200, 1100])
@either_form
def test_nan_and_the_smallest_and_largest_scales_reach_the_result(woven: bool, rows: int) -> None:
    standard = weight(64, 256)
    standard.scales[3, 1], standard.scales[7, 2], standard.scales[9, 5] = 255, 0, hopper.MAX_SCALE
    standard.codes.view(torch.uint8)[20, 70] = 0x7F
    x = torch.randn(rows, 256, device="cuda").bfloat16()
    want = x.float() @ dequantise(standard, torch.float32).cuda().T
    got = hopper.linear(x, hopper.prepare(_on_gpu(standard), woven=woven)).float()
    there = torch.ones(64, dtype=torch.bool)
    there[[3, 20]] = False
    assert got[:, ~there].isnan().all()
    assert error(got[:, 9:10], want[:, 9:10]) < 2.0**-7
    there[9] = False
    assert error(got[:, there], want[:, there]) < 2.0**-7


@needs_hopper
@pytest.mark.parametrize("forms", [(False, False), (True, True), (True, False)])
def test_two_weights_in_one_launch_give_what_each_gives_alone(forms: tuple[bool, bool]) -> None:
    first, second = (
        hopper.prepare(_on_gpu(weight(n, 640)), woven=woven)
        for n, woven in zip((96, 48), forms, strict=True)
    )
    for rows in (1, 9, 64, 200, 600):
        x = torch.randn(rows, 640, device="cuda").bfloat16()
        a, b = hopper.pair(hopper.linear)(x, first, second)
        assert torch.equal(a, hopper.linear(x, first))
        assert torch.equal(b, hopper.linear(x, second))


def large_weight(n: int, k: int) -> Mxfp8Weight:
    codes = torch.randint(0x28, 0x48, (n, k), dtype=torch.uint8, device="cuda")
    codes |= torch.randint(2, (n, k), dtype=torch.uint8, device="cuda") << 7
    scales = torch.randint(112, 122, (n, k // 32), dtype=torch.uint8, device="cuda")
    return Mxfp8Weight(codes.view(torch.float8_e4m3fn), scales)


def _on_gpu(standard: Mxfp8Weight) -> Mxfp8Weight:
    return Mxfp8Weight(standard.codes.cuda(), standard.scales.cuda())
