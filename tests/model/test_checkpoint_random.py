"""Random weights: in the formats asked for, sane, reproducible, and refused when too large."""

from __future__ import annotations

import pytest
import torch
from support.checkpoints import config
from torch import Tensor

from winnow.errors import CapacityError, UnsupportedError
from winnow.model.checkpoint import random, random_weights
from winnow.model.weights import ModelWeights, nbytes
from winnow.ops.weights import MoeWeights, Mxfp8Weight, Nvfp4Weight, PlainWeight, Weight, tensors
from winnow.spec.formats import FORMATS
from winnow.spec.memory import weight_bytes
from winnow.spec.model import ModelSpec
from winnow.spec.presets import preset

SPEC = ModelSpec.from_hf(config(hidden_size=256))
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def plain(weight: Weight) -> Tensor:
    """fp32 values, decoded here by hand."""
    match weight:
        case PlainWeight(data):
            return data.float()
        case Mxfp8Weight(codes, scales):
            return codes.float() * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
        case Nvfp4Weight(codes, scales, global_scales):
            nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()
            values = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1, 1)
            return values * scales.float().repeat_interleave(16, -1) * global_scales[..., None]


def moe(model: ModelWeights) -> MoeWeights:
    mlp = model.layers[1].mlp
    assert isinstance(mlp, MoeWeights)
    return mlp


@pytest.mark.parametrize("linear", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("experts", ["bf16", "mxfp8", "nvfp4"])
def test_random_weights_take_the_bytes_that_spec_predicts(experts: str, linear: str) -> None:
    model = random_weights(SPEC, torch.bfloat16, experts, linear)
    formats = (FORMATS[experts], FORMATS[linear], FORMATS["bf16"])
    assert nbytes(model) == weight_bytes(SPEC, *formats)


@pytest.mark.parametrize("name", ["fp32", "mxfp8", "nvfp4"])
def test_random_matrices_are_finite_and_near_one_over_root_k(name: str) -> None:
    model = random_weights(SPEC, torch.float32, name, name)
    for weight in (model.layers[1].attention.qkv, moe(model).gate_up, moe(model).down):
        values = plain(weight)
        assert values.isfinite().all()
        assert 0.6 < float(values.square().mean().sqrt()) * values.shape[-1] ** 0.5 < 1.6
        assert abs(float(values.mean())) < float(values.std()) / 10


def test_the_same_seed_gives_the_same_weights_and_another_does_not() -> None:
    one, two, other = (random_weights(SPEC, torch.bfloat16, "nvfp4", "mxfp8", s) for s in (5, 5, 6))
    for a, b, c in zip(*(tensors(moe(m).gate_up)[:2] for m in (one, two, other)), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        assert not torch.equal(a.view(torch.uint8), c.view(torch.uint8))


@pytest.mark.parametrize("name", ["fp32", "fp8", "int4"])
def test_a_format_that_cannot_be_made_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"'{name}' .* use bf16, mxfp8 or nvfp4"):
        random_weights(SPEC, torch.bfloat16, "nvfp4", name)


def test_a_model_that_does_not_fit_is_refused_with_the_layers_that_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = preset("minimax-m3.1-flash")
    monkeypatch.setattr(random, "free_memory_bytes", lambda device: 20 * 10**9)
    with pytest.raises(CapacityError) as raised:
        random_weights(spec, torch.bfloat16, "nvfp4", "mxfp8")
    words = str(raised.value)
    assert "60 layers take 248.7 GB, 20.0 GB of memory are free" in words
    fitting = int(words.split("(--layers) ")[1].split()[0])
    formats = [FORMATS[name] for name in ("nvfp4", "mxfp8", "bf16")]
    assert sum(weight_bytes(spec.with_layers(fitting), *formats).values()) <= 20 * 10**9
    assert sum(weight_bytes(spec.with_layers(fitting + 1), *formats).values()) > 20 * 10**9


def test_a_model_of_which_no_layer_fits_is_refused_without_such_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "free_memory_bytes", lambda device: 1000)
    with pytest.raises(CapacityError, match="not even one layer fits"):
        random_weights(SPEC, torch.bfloat16, "nvfp4", "mxfp8")


def test_free_memory_is_a_sane_number_of_bytes() -> None:
    assert 2**20 < random.free_memory_bytes(torch.device("cpu")) < 2**50


def test_a_tied_head_is_the_embedding_itself() -> None:
    spec = ModelSpec.from_hf(config(tie_word_embeddings=True))
    model = random_weights(spec, torch.bfloat16, "bf16", "bf16")
    assert model.head.data is model.embedding
    assert nbytes(model)["head"] == 0
