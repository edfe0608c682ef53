"""Inputs of the number-format ops. Every output must be equal bit for bit, so tensors are compared
as integers: a NaN's payload is the one thing about a dequantised value that may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from winnow.ops.case import Case, Cost, Outputs
from winnow.spec.formats import FP8, MXFP8, NVFP4, Format

_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor; of NaN, where the dtype has several, one for all."""
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)
    same_nan = tensor.masked_fill(tensor.isnan(), torch.nan)
    return same_nan.view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)


def _quantised(function: Callable[..., Any], inputs: dict[str, Any]) -> Outputs:
    result = function(**inputs)
    codes, scales = result if isinstance(result, tuple) else (result, None)
    outputs = {"codes": _bits(codes)}
    return outputs if scales is None else {**outputs, "scales": _bits(scales)}


def _dequantised(function: Callable[..., Any], inputs: dict[str, Any]) -> Outputs:
    return {"values": _bits(function(**inputs))}


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _random_bits(*shape: int, seed: int = 0) -> Tensor:
    """fp32 of every kind: subnormal, huge, inf, NaN."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator)
    return bits.to(torch.int32).view(torch.float32)


def _random_bytes(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _around(points: tuple[float, ...]) -> Tensor:
    """Each point and its fp32 neighbours, of both signs."""
    exact = torch.tensor(points)
    above, below = exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(0.0))
    magnitudes = torch.cat((exact, above, below))
    return torch.cat((magnitudes, -magnitudes))


def _groups_with(first: float, values: Tensor, group: int) -> Tensor:
    """Groups that begin with `first`, which then fixes the scale, and go on with `values`."""
    per_group = group - 1
    padded = torch.zeros(-(-values.numel() // per_group) * per_group)
    padded[: values.numel()] = values
    rows = padded.view(-1, per_group)
    return torch.cat((torch.full((len(rows), 1), first), rows), dim=1)


def _ramp(group: int, amaxes: tuple[float, ...]) -> Tensor:
    """One group per largest magnitude, falling to zero with alternating signs."""
    steps = torch.linspace(1, 0, group) * torch.tensor([1.0, -1.0]).repeat(group // 2)
    return torch.tensor(amaxes).unsqueeze(-1) * steps


def _special(group: int) -> Tensor:
    """Groups of zeros, of negative zeros, and with inf or NaN among ordinary values."""
    x = _random(8, group)
    x[0] = 0.0
    x[1] = -0.0
    x[2, ::2] = -0.0
    x[3, 5] = torch.inf
    x[4, 7] = -torch.inf
    x[5, 3] = torch.nan
    x[6, 2], x[6, 9] = torch.inf, torch.nan
    return x


def _sources(group: int) -> dict[str, Tensor]:
    """What every quantiser must take, its last axis a multiple of `group`."""
    return {
        "one token bf16": _random(1, 128).bfloat16(),
        "16 tokens": _random(16, 128),
        "4 heads fp16": _random(129, 4, 64).half(),
        "one group": _random(group),
        "no rows": torch.empty(0, 128),
        "no columns": torch.empty(3, 0),
        "transposed": _random(128, 24).T,
        "every other": _random(5, 256)[:, ::2],
        "zeros, inf, NaN": _special(group),
        "any bits": _random_bits(64, 128),
        "huge": _ramp(group, (2784.0, 2785.0, 1e5, 1e30, 3.4e38)),
        "tiny": _ramp(group, (6 * 2.0**-10, 0.006, 1e-3, 2.0**-126, 1e-40, 1e-45)),
    }


def _case(
    op: str,
    name: str,
    inputs: Mapping[str, Any],
    fmt: Format,
    num_values: int,
    value_bytes: int,
) -> Case:
    quantises = op.startswith("quantise")
    outputs = ["codes", *(["scales"] if fmt.group else [])] if quantises else ["values"]
    return Case(
        op=op,
        name=name,
        # Unlike a clone, a deep copy of a tensor keeps the strides of a view with gaps.
        inputs=lambda: deepcopy(dict(inputs)),
        outputs=_quantised if quantises else _dequantised,
        tolerances=dict.fromkeys(outputs, 0.0),
        cost=Cost(num_bytes=fmt.nbytes(num_values) + num_values * value_bytes),
    )


def _quantise(op: str, fmt: Format, name: str, x: Tensor, **options: Any) -> Case:
    return _case(op, name, {"x": x, **options}, fmt, x.numel(), x.element_size())


def _dequantise(op: str, fmt: Format, name: str, num_values: int, **inputs: Any) -> Case:
    dtype: torch.dtype = inputs.get("dtype", torch.float32)
    return _case(op, name, inputs, fmt, num_values, dtype.itemsize)


def _nvfp4_parts(*shape: int) -> dict[str, Tensor]:
    """Random codes and scales of a tensor of this shape, all bytes included."""
    *rows, width = shape
    return {
        "codes": _random_bytes(*rows, width // 2),
        "scales": _random_bytes(*rows, width // 16, seed=1).view(torch.float8_e4m3fn),
    }


def _mxfp8_parts(*shape: int) -> dict[str, Tensor]:
    *rows, width = shape
    return {
        "codes": _random_bytes(*shape).view(torch.float8_e4m3fn),
        "scales": _random_bytes(*rows, width // 32, seed=1),
    }


def _every_pair(num_scales: int) -> tuple[Tensor, Tensor]:
    """Every byte of codes under every byte of scales: [256, 256], [256, num_scales]."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return every.repeat(256, 1), every.view(-1, 1).repeat(1, num_scales)


def _nvfp4() -> tuple[Case, ...]:
    rows = _random(1, 24, 1).exp()
    codes, scales = _every_pair(32)
    every = {"codes": codes, "scales": scales.view(torch.float8_e4m3fn)}
    page = _nvfp4_parts(2, 128, 128)
    row = _random_bytes(3, 128 * 72 + 128)
    in_rows = {
        "codes": row[:, : 128 * 64].view(3, 128, 64),
        "scales": row[:, 128 * 64 : 128 * 72].view(3, 128, 8).view(torch.float8_e4m3fn),
    }
    sources = _sources(16) | {
        "midpoints": _groups_with(6.0, _around(_E2M1_MIDPOINTS), 16),
        "midpoints of the scale": _ramp(16, tuple(6 * (1 + k / 16) for k in range(16))),
    }
    q, d = "quantise_nvfp4", "dequantise_nvfp4"
    return (
        *(_quantise(q, NVFP4, name, x) for name, x in sources.items()),
        _quantise(q, NVFP4, "global scale", _random(24, 128), global_scale=0.37),
        _quantise(q, NVFP4, "least global scale", _random(8, 64), global_scale=2.0**-117),
        _quantise(q, NVFP4, "greatest global scale", _special(16), global_scale=2.0**119),
        _quantise(q, NVFP4, "a scale a row", _random(3, 24, 64), global_scale=rows, strict=True),
        _quantise(q, NVFP4, "any bits, scaled", _random_bits(64, 128, seed=1), global_scale=3e-5),
        _dequantise(d, NVFP4, "no rows", 0, **_nvfp4_parts(0, 128)),
        _dequantise(d, NVFP4, "one group", 16, **_nvfp4_parts(16)),
        _dequantise(d, NVFP4, "views of rows", 3 * 128 * 128, **in_rows),
        _dequantise(d, NVFP4, "a scale a row", 3 * 24 * 64, **_nvfp4_parts(3, 24, 64),
                    global_scale=rows),
        *(
            case
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            for case in (
                _dequantise(d, NVFP4, f"all pairs {dtype}", 512 * 256, **every, dtype=dtype),
                _dequantise(d, NVFP4, f"scaled {dtype}", 2 * 128 * 128, **page, dtype=dtype,
                            global_scale=0.0123),
            )
        ),
    )  # fmt: skip


def _mxfp8() -> tuple[Case, ...]:
    codes, scales = _every_pair(8)
    every = {"codes": codes.view(torch.float8_e4m3fn), "scales": scales}
    transposed = {
        "codes": _random_bytes(64, 24).T.view(torch.float8_e4m3fn),
        "scales": _random_bytes(2, 24).T,
    }
    sources = _sources(32) | {
        "edge of the scale": _groups_with(1.75, _around((1.75,)), 32)
        * torch.tensor([[2.0**k] for k in range(-130, 127)]),
        "above the edge": _ramp(32, (448.00003, 449.0, 511.0, 512.0, 1.7500001, 1e-38)),
    }
    q, d = "quantise_mxfp8", "dequantise_mxfp8"
    return (
        *(_quantise(q, MXFP8, name, x) for name, x in sources.items()),
        _quantise(q, MXFP8, "weights", _random(96, 256).bfloat16(), strict=True),
        _dequantise(d, MXFP8, "no rows", 0, **_mxfp8_parts(0, 128)),
        _dequantise(d, MXFP8, "one group", 32, **_mxfp8_parts(32)),
        _dequantise(d, MXFP8, "transposed", 24 * 64, **transposed),
        *(
            _dequantise(d, MXFP8, f"all pairs {dtype}", 256 * 256, **every, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ),
    )


def _fp8() -> tuple[Case, ...]:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    midpoints = every[:127].float()
    edges = _around(tuple(((midpoints[1:] + midpoints[:-1]) / 2).tolist()))
    sources = _sources(16) | {
        "midpoints": edges,
        "clipped": _around((448.0, 464.0, 480.0, 1e9)),
        "odd": _random(3, 5),
    }
    q, d = "quantise_fp8", "dequantise_fp8"
    return (
        *(_quantise(q, FP8, name, x) for name, x in sources.items()),
        _quantise(q, FP8, "scaled", _random_bits(64, 128, seed=1), scale=0.37),
        _dequantise(d, FP8, "no rows", 0, codes=every[:0]),
        _dequantise(d, FP8, "odd", 255, codes=every[1:]),
        _dequantise(d, FP8, "every other", 128, codes=every[::2]),
        *(
            _dequantise(d, FP8, f"all, scale {scale}, {dtype}", 256, codes=every, dtype=dtype,
                        scale=scale)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            for scale in (1.0, 0.37)
        ),
    )  # fmt: skip


CASES: tuple[Case, ...] = (*_nvfp4(), *_mxfp8(), *_fp8())
