"""Experts as `winnow.ops.moe.hopper_prefill` takes them, and what its kernels store, for tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from winnow.ops.case_data import moe_weights, small_spec
from winnow.ops.fragments import pack
from winnow.ops.weights import MlpWeights, MoeWeights, Nvfp4Weight
from winnow.spec.model import ModelSpec

SPEC = replace(small_spec(), hidden_size=512, expert_width=384, shared_width=256, num_experts=12)


def packed(spec: ModelSpec = SPEC, seed: int = 3) -> MoeWeights:
    """Random NVFP4 experts, packed, on the CPU, and a shared one that is not; global scales differ
    from row to row."""
    generator = torch.Generator().manual_seed(seed)
    weights = moe_weights("nvfp4", generator, spec)

    def own(weight: Nvfp4Weight) -> Nvfp4Weight:
        scales = weight.global_scales * (
            0.5 + torch.rand(weight.global_scales.shape, generator=generator)
        )
        return replace(weight, global_scales=scales)

    assert isinstance(weights.gate_up, Nvfp4Weight)
    assert isinstance(weights.down, Nvfp4Weight)
    return replace(weights, gate_up=pack(own(weights.gate_up)), down=pack(own(weights.down)))


def joined(spec: ModelSpec = SPEC) -> MoeWeights:
    """`packed` with a shared expert that is packed, too, on the GPU."""
    weights = on_gpu(packed(spec))
    shared = weights.shared
    assert isinstance(shared.gate_up, Nvfp4Weight)
    assert isinstance(shared.down, Nvfp4Weight)
    return replace(weights, shared=MlpWeights(pack(shared.gate_up), pack(shared.down)))


def on_gpu(weights: MoeWeights) -> MoeWeights:
    def moved(weight: object) -> object:
        return type(weight)(*(t.to("cuda") for t in vars(weight).values()))

    return replace(
        weights,
        router=weights.router.to("cuda"),
        router_bias=weights.router_bias.to("cuda"),
        gate_up=moved(weights.gate_up),
        down=moved(weights.down),
        shared=MlpWeights(moved(weights.shared.gate_up), moved(weights.shared.down)),
    )


def rows_of(count: int, spec: ModelSpec = SPEC, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, spec.hidden_size, generator=generator).bfloat16()


def from_slabs(slabs: Tensor, dtype: torch.dtype) -> Tensor:
    """[capacity, columns] of what kernels store by slabs."""
    count, capacity, _ = slabs.shape
    chunks = slabs.view(count, capacity, 8, 16)
    place = torch.arange(capacity, device=slabs.device)
    order = torch.arange(8, device=slabs.device) ^ (place % 8).unsqueeze(1)
    index = order.view(1, capacity, 8, 1).expand(count, capacity, 8, 16)
    straight = chunks.gather(2, index).reshape(count, capacity, 128).view(dtype)
    return straight.permute(1, 0, 2).reshape(capacity, -1)
