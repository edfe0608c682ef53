"""Weights with random values in a model's real shape and formats, for measuring without a
checkpoint. Values are made in the format itself: no matrix ever exists in a wider one.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor

from winnow.errors import CapacityError, UnsupportedError
from winnow.model.checkpoint.assemble import allocate, layer_weights
from winnow.model.checkpoint.names import Matrix, layer_names
from winnow.model.weights import LayerWeights, ModelWeights, Prepare, as_stored, prepared
from winnow.ops.weights import Mxfp8Weight, Nvfp4Weight, PlainWeight, Weight
from winnow.spec.formats import BF16, FP32, MXFP8, NVFP4, Format
from winnow.spec.memory import weight_bytes
from winnow.spec.model import ModelSpec

_PLAIN = {torch.float32: FP32, torch.bfloat16: BF16}
_BLOCK_SCALED = {fmt.name: fmt for fmt in (MXFP8, NVFP4)}

# Root mean square of E2M1 over all codes, and of E4M3 over the codes that _fill_mxfp8 makes.
_E2M1_RMS = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
_E4M3_MASK = 0xBF
"""Clears the top exponent bit: magnitudes below 2, so neither NaN nor values far above the rest."""
_NORM_STD = 0.1
_BIAS_STD = 0.01


def random_weights(
    spec: ModelSpec,
    dtype: torch.dtype,
    experts: str,
    linear: str,
    seed: int = 0,
    device: torch.device | str = "cpu",
    prepare: Prepare = as_stored,
) -> ModelWeights:
    """Random weights of the model `spec`, of standard deviation near 1 / sqrt(K).

    `experts` and `linear` name the formats of routed experts and of all other linears: mxfp8,
    nvfp4, or the format of `dtype` (fp32 or bf16), which embedding, head and norms have as in a
    checkpoint. The same seed gives the same weights on the same kind of device. Each layer goes
    through `prepare` once it is made. Raises
    UnsupportedError for another format, CapacityError when free memory does not hold the model.
    """
    plain = _PLAIN[dtype]
    expert_format, linear_format = _format(experts, plain), _format(linear, plain)
    place = torch.device(device)
    _check_memory(spec, (expert_format, linear_format, plain), free_memory_bytes(place))
    maker = _Maker(dtype, place, seed)
    embedding = maker.normal((spec.vocab_size, spec.hidden_size), 1.0, dtype)
    head = embedding
    if not spec.tied_embeddings:
        head = maker.normal(embedding.shape, spec.hidden_size**-0.5, dtype)
    layers = tuple(
        prepared(maker.layer(spec, i, expert_format, linear_format), prepare)
        for i in range(spec.num_layers)
    )
    final_norm = maker.normal((spec.hidden_size,), _NORM_STD, torch.float32)
    return ModelWeights(embedding, layers, final_norm, PlainWeight(head))


def _format(name: str, plain: Format) -> Format:
    if name == plain.name:
        return plain
    if name not in _BLOCK_SCALED:
        raise UnsupportedError(
            f"no random weights in format {name!r} with a compute dtype of {plain.name}: "
            f"use {plain.name}, {' or '.join(_BLOCK_SCALED)}"
        )
    return _BLOCK_SCALED[name]


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now; all of a host's memory where the system does
    not say how much of it is free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Free pages alone would leave out the file cache, which gives way to an allocation.
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_memory(spec: ModelSpec, formats: tuple[Format, Format, Format], free: int) -> None:
    def needed(model: ModelSpec) -> int:
        return sum(weight_bytes(model, *formats).values())

    if needed(spec) <= free:
        return
    fitting = [n for n in range(1, spec.num_layers) if needed(spec.with_layers(n)) <= free]
    advice = (
        f"cut the model with num_layers (--layers) {fitting[-1]} or choose a smaller format"
        if fitting
        else "not even one layer fits, choose a smaller format or another machine"
    )
    raise CapacityError(
        f"weights of {spec.num_layers} layers take {needed(spec) / 1e9:.1f} GB, "
        f"{free / 1e9:.1f} GB of memory are free: {advice}"
    )


class _Maker:
    """Fills allocated tensors from one random generator."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype = dtype
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, shape: tuple[int, ...], std: float, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return tensor.normal_(0, std, generator=self.generator)

    def layer(self, spec: ModelSpec, layer: int, experts: Format, linear: Format) -> LayerWeights:
        names = layer_names(spec, layer)
        stds = {"router": spec.hidden_size**-0.5, "router_bias": _BIAS_STD}
        plain = {
            role: self.normal(tensor.shape, stds.get(role, _NORM_STD), torch.float32)
            for role, tensor in names.plain.items()
        }
        matrices = {
            role: self.matrix(matrix, experts if matrix.is_expert else linear)
            for role, matrix in names.matrices.items()
        }
        return layer_weights(matrices, plain)

    def matrix(self, matrix: Matrix, held: Format) -> Weight:
        lead = (matrix.num_experts,) if matrix.is_expert else ()
        weight_format = held.name if held.name in _BLOCK_SCALED else "plain"
        shape = (*lead, matrix.rows, matrix.columns)
        weight = allocate(weight_format, shape, self.dtype, self.device)
        std = matrix.columns**-0.5
        match weight:
            case PlainWeight(data):
                data.normal_(0, std, generator=self.generator)
            case Mxfp8Weight(codes, scales):
                self._bytes(codes).bitwise_and_(_E4M3_MASK)
                exponent = round(math.log2(std / _e4m3_rms()))
                self._bytes(scales, 127 + exponent - 1, 127 + exponent + 1)
            case Nvfp4Weight(codes, scales, global_scales):
                self._bytes(codes)
                # The eight E4M3 codes from 0.75 to 1.375.
                self._bytes(scales, 0x34, 0x3C)
                global_scales.fill_(std / _E2M1_RMS)
        return weight

    def _bytes(self, tensor: Tensor, low: int = 0, high: int = 256) -> Tensor:
        """Fill with uniform bytes in [low, high); the tensor as uint8."""
        return tensor.view(torch.uint8).random_(low, high, generator=self.generator)


def _e4m3_rms() -> float:
    """Root mean square over the codes that _E4M3_MASK leaves."""
    codes = torch.arange(256, dtype=torch.uint8).bitwise_and_(_E4M3_MASK)
    return float(codes.view(torch.float8_e4m3fn).float().square().mean().sqrt())
