"""The fast CPU versions give the reference's bits, and the shared cases tell when one does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from winnow.ops.case import Case, judge
from winnow.ops.codec import cpu, reference
from winnow.ops.codec.cases import CASES

FUNCTIONS = (
    "quantise_nvfp4",
    "dequantise_nvfp4",
    "quantise_mxfp8",
    "dequantise_mxfp8",
    "quantise_fp8",
    "dequantise_fp8",
)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def assert_same_parts(x: Tensor, *args: Any) -> None:
    for got, want in zip(
        cpu.quantise_nvfp4(x, *args), reference.quantise_nvfp4(x, *args), strict=True
    ):
        assert got.dtype == want.dtype
        assert torch.equal(bits(got), bits(want))


def random_bits(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-(2**31), 2**31, shape, generator=generator)
    return drawn.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}/{case.name}")
def test_the_cpu_version_gives_the_references_bits(case: Case) -> None:
    for verdict in judge(case, getattr(cpu, case.op), getattr(reference, case.op)):
        assert verdict.passed, verdict


def test_every_op_has_cases_with_names_of_their_own() -> None:
    names = [(case.op, case.name) for case in CASES]
    assert len(set(names)) == len(names)
    assert {op for op, _ in names} == set(FUNCTIONS)
    assert all(tolerance == 0.0 for case in CASES for tolerance in case.tolerances.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}/{case.name}")
def test_inputs_are_left_as_they_were(case: Case) -> None:
    for module in (cpu, reference):
        inputs, before = case.inputs(), case.inputs()
        getattr(module, case.op)(**inputs)
        for name, value in before.items():
            if isinstance(value, Tensor):
                assert torch.equal(bits(inputs[name]), bits(value))


def spoiled(op: str, spoil: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def function(**inputs: Any) -> Any:
        result = getattr(reference, op)(**inputs)
        return tuple(map(spoil, result)) if isinstance(result, tuple) else spoil(result)

    return function


def lose_sign_of_zero(result: Tensor) -> Tensor:
    if result.dtype == torch.float8_e4m3fn:
        raw = result.view(torch.uint8)
        return raw.masked_fill(raw == 0x80, 0).view(torch.float8_e4m3fn)
    if result.dtype == torch.uint8:
        return torch.where(result & 0x0F == 8, result & 0xF0, result)
    return result + 0.0


def hide_nan(result: Tensor) -> Tensor:
    if result.dtype == torch.float8_e4m3fn:
        raw = result.view(torch.uint8)
        return raw.masked_fill(raw == 0x7F, 0x7E).view(torch.float8_e4m3fn)
    return result if result.dtype == torch.uint8 else result.nan_to_num(0.0)


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("spoil", [lose_sign_of_zero, hide_nan])
def test_a_version_that_loses_a_sign_of_zero_or_a_nan_fails_some_case(
    op: str, spoil: Callable[[Tensor], Tensor]
) -> None:
    verdicts = [
        verdict
        for case in CASES
        if case.op == op
        for verdict in judge(case, spoiled(op, spoil), getattr(reference, op))
    ]
    assert any(not verdict.passed for verdict in verdicts)


def test_nvfp4_rounds_like_the_reference_on_every_bf16_below_six() -> None:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    values = values[values.abs() <= 6]  # drops NaN
    values = values[: len(values) // 15 * 15].view(-1, 15)
    groups = torch.cat((torch.full((len(values), 1), 6.0, dtype=torch.bfloat16), values), dim=1)
    assert_same_parts(groups)
    assert bool((cpu.quantise_nvfp4(groups)[1].float() == 1).all())


@pytest.mark.parametrize("scale_byte", [1, 7, 8, 56, 119, 126])
def test_nvfp4_rounds_like_the_reference_around_every_midpoint_under_any_scale(
    scale_byte: int,
) -> None:
    scale = torch.tensor([scale_byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 1e-30]) * scale
    ulps = torch.arange(-40, 40, dtype=torch.int32).unsqueeze(-1)
    near = (midpoints.view(torch.int32) + ulps).view(torch.float32).view(-1, 5)
    six = (6 * scale).expand(len(near), 1)
    assert_same_parts(torch.cat((six, near, -near, near[:, :5]), dim=1))


@pytest.mark.parametrize("global_scale", [1.0, 0.37, 2.0**-117, 2.0**119, 1e-3])
def test_nvfp4_gives_the_references_bits_for_any_fp32_bits(global_scale: float) -> None:
    for seed in range(4):
        x = random_bits(512, 128, seed=seed)
        assert_same_parts(x, global_scale)
        # Without huge values beside them, small ones reach codes other than 0.
        narrow = torch.randn(512, 128, generator=torch.Generator().manual_seed(seed))
        assert_same_parts(narrow * global_scale, global_scale)


def test_mxfp8_and_fp8_give_the_references_bits_for_any_fp32_bits() -> None:
    for seed in range(4):
        x = random_bits(512, 128, seed=seed)
        for scale in (1.0, 0.37, 1e-20, 1e20):
            assert torch.equal(
                bits(cpu.quantise_fp8(x, scale)), bits(reference.quantise_fp8(x, scale))
            )
        for got, want in zip(cpu.quantise_mxfp8(x), reference.quantise_mxfp8(x), strict=True):
            assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("magnitude", [1.0, 440.0, 448.0, 464.0, 464.1, 1e5])
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.0])
def test_counts_of_clipped_values_are_the_references(magnitude: float, scale: float) -> None:
    x = torch.rand(8, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[0, 0], x[1, 0] = 1.0, -1.0
    x = x * magnitude * scale
    assert cpu.count_saturated_fp8(x, scale) == reference.count_saturated_fp8(x, scale)
    assert cpu.count_saturated_nvfp4(x * 6, scale) == reference.count_saturated_nvfp4(x * 6, scale)
    rows = torch.full((8, 1), scale)
    assert cpu.count_saturated_nvfp4(x * 6, rows) == reference.count_saturated_nvfp4(x * 6, rows)
    x[2, 3] = torch.nan
    x[2, 4] = torch.inf
    assert cpu.count_saturated_fp8(x, scale) == reference.count_saturated_fp8(x, scale) > 0
    assert cpu.count_saturated_nvfp4(x, scale) == reference.count_saturated_nvfp4(x, scale)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("quantise_nvfp4", (torch.ones(2, 17),)),
        ("quantise_nvfp4", (torch.ones(2, 16, dtype=torch.float64),)),
        ("quantise_nvfp4", (torch.ones(2, 16), 0.0)),
        ("quantise_nvfp4", (torch.ones(2, 16), torch.ones(2))),
        ("dequantise_nvfp4", (torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2, 1))),
        ("count_saturated_nvfp4", (torch.ones(2, 17),)),
        ("count_saturated_nvfp4", (torch.ones(2, 16), 0.0)),
        ("count_saturated_nvfp4", (torch.ones(2, 16), float("inf"))),
        ("count_saturated_nvfp4", (torch.ones(0, 16), -1.0)),
        ("quantise_mxfp8", (torch.ones(2, 16),)),
        ("dequantise_mxfp8", (torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.uint8))),
        ("quantise_fp8", (torch.ones(2), 0.0)),
        ("quantise_fp8", (torch.ones(2, dtype=torch.int32),)),
        ("dequantise_fp8", (torch.ones(2),)),
        ("dequantise_fp8", (torch.ones(2).to(torch.float8_e4m3fn), -1.0)),
        ("count_saturated_fp8", (torch.ones(2), 0.0)),
    ],
)
def test_the_cpu_version_refuses_what_the_reference_refuses(op: str, args: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError)) as want:
        getattr(reference, op)(*args)
    with pytest.raises(type(want.value)) as got:
        getattr(cpu, op)(*args)
    assert str(got.value) == str(want.value)


@pytest.mark.parametrize("op", ["quantise_nvfp4", "quantise_mxfp8"])
def test_the_cpu_version_is_strict_too(op: str) -> None:
    x = torch.ones(2, 32)
    x[1, 3] = torch.nan
    with pytest.raises(ValueError, match="1 of 64 values are not finite"):
        getattr(cpu, op)(x, strict=True)


def test_writing_to_a_result_changes_no_later_result() -> None:
    codes, scales = cpu.quantise_nvfp4(torch.full((1, 16), 6.0))
    cpu.dequantise_nvfp4(codes, scales).fill_(9.0)
    assert cpu.dequantise_nvfp4(codes, scales).tolist() == [[6.0] * 16]
    fp8 = cpu.quantise_fp8(torch.ones(4))
    cpu.dequantise_fp8(fp8).fill_(9.0)
    assert cpu.dequantise_fp8(fp8).tolist() == [1.0] * 4
