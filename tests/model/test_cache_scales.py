"""Scales of an FP8 KV cache: all read or refused, each used for its own tensor of its own layer."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import driving
from support.checkpoints import DIM, HIDDEN, KINDS, KV_HEADS, LAYERS, VOCABULARY, build
from torch import Tensor

from winnow.engine.engine import Engine
from winnow.engine.storage import PageStorage
from winnow.errors import CheckpointError
from winnow.model.checkpoint import convert, load_checkpoint, read_spec
from winnow.ops.batch import Batch
from winnow.ops.case import error
from winnow.ops.codec import reference as codec
from winnow.ops.paged import CacheScales, LayerPages, read
from winnow.spec.formats import FP8, FP32
from winnow.spec.page import RowLayout

KEY, VALUE = "k_proj.k_scale", "v_proj.v_scale"
LENGTH = 300

# Layers whose K and V need scales so far apart that the scale of another layer, or of the other of
# the two, either clips the values or rounds them to nothing.
K_SIZES, V_SIZES = (256.0, 2.0**-9, 8192.0), (2.0**-13, 16.0, 2.0**-5)
SCALES = tuple(CacheScales(key=k / 64, value=v / 8) for k, v in zip(K_SIZES, V_SIZES, strict=True))


def scale_name(layer: int, suffix: str, prefix: str = "") -> str:
    return f"{prefix}model.layers.{layer}.self_attn.{suffix}"


def stored(
    scales: tuple[CacheScales, ...] = SCALES,
    prefix: str = "",
    shape: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """The scales as tensors by their names on disk."""
    return {
        scale_name(layer, suffix, prefix): torch.full(shape, number, dtype=dtype)
        for layer, own in enumerate(scales)
        for suffix, number in ((KEY, own.key), (VALUE, own.value))
    }


def load_scales(directory: Path) -> tuple[CacheScales, ...] | None:
    spec = read_spec(directory)
    return load_checkpoint(directory, spec, torch.float32, progress=False).cache_scales


def sized(directory: Path, **extra: Tensor) -> Path:
    """A checkpoint whose K and V have the sizes that SCALES are made for."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for layer, (k_size, v_size) in enumerate(zip(K_SIZES, V_SIZES, strict=True)):
        attention = f"model.layers.{layer}.self_attn"
        # The norm's scale is 1 + weight, so this is K's root mean square.
        tensors[f"{attention}.k_norm.weight"] = torch.full((DIM,), k_size - 1)
        values = torch.randn(KV_HEADS * DIM, HIDDEN, generator=generator)
        tensors[f"{attention}.v_proj.weight"] = values * v_size * HIDDEN**-0.5
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.zeros(HIDDEN)
    build(directory, "hub", extra=tensors | extra, dtype=torch.float32, torch_dtype="float32")
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_every_kind_are_read_layer_by_layer_with_k_and_v_apart(
    tmp_path: Path, kind: str
) -> None:
    prefix = "" if kind in ("hub", "transformers-text") else "language_model."
    scales = tuple(CacheScales(key=2.0 + n, value=0.125 * (n + 1)) for n in range(LAYERS))
    build(tmp_path, kind, extra=stored(scales, prefix), shards=2)
    assert load_scales(tmp_path) == scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_may_be_a_scalar_or_one_value_of_either_dtype(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    scales = tuple(CacheScales(key=2.0 + n, value=0.25) for n in range(LAYERS))
    build(tmp_path, "hub", extra=stored(scales, shape=shape, dtype=dtype))
    assert load_scales(tmp_path) == scales


def test_a_checkpoint_without_scales_has_none(tmp_path: Path) -> None:
    build(tmp_path, "hub")
    assert load_scales(tmp_path) is None


@pytest.mark.parametrize("suffix", [KEY, VALUE])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_one_missing_scale_is_an_error_that_names_it(
    tmp_path: Path, layer: int, suffix: str
) -> None:
    name = scale_name(layer, suffix)
    build(tmp_path, "hub", extra=stored(), drop=(name,))
    with pytest.raises(CheckpointError, match=rf"lacks tensor {name}: 5 of 6 scales of an FP8"):
        load_scales(tmp_path)


@pytest.mark.parametrize("left", [KEY, VALUE])
def test_scales_of_k_alone_or_of_v_alone_are_refused(tmp_path: Path, left: str) -> None:
    extra = {name: scale for name, scale in stored().items() if name.endswith(left)}
    build(tmp_path, "hub", extra=extra)
    missing = scale_name(0, VALUE if left == KEY else KEY)
    with pytest.raises(CheckpointError, match=rf"lacks tensor {missing}: 3 of 6 scales"):
        load_scales(tmp_path)


@pytest.mark.parametrize("suffix", [KEY, VALUE])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.tensor(0.0), r"is 0\.0: the scale of a cache must be positive and finite"),
        (torch.tensor(-2.0), r"is -2\.0: "),
        (torch.tensor(torch.inf), r"is inf: "),
        (torch.tensor([torch.nan]), r"is nan: "),
        (torch.ones(2), r"shape \[2\], expected \[\]"),
        (torch.tensor(1, dtype=torch.int32), r"dtype I32, expected BF16 or F32"),
    ],
)
def test_a_wrong_scale_is_named_with_its_file(
    tmp_path: Path, suffix: str, wrong: Tensor, message: str
) -> None:
    name = scale_name(1, suffix)
    build(tmp_path, "hub", extra=stored() | {name: wrong})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {name}.*{message}"):
        load_scales(tmp_path)


def test_scales_of_a_layer_that_is_not_there_are_not_understood(tmp_path: Path) -> None:
    extra = stored((*SCALES, CacheScales(1.0, 1.0)))
    build(tmp_path, "hub", extra=extra)
    with pytest.raises(CheckpointError, match=r"layers\.3\.self_attn\.k_proj\.k_scale is not und"):
        load_scales(tmp_path)


def written_errors(engine: Engine) -> list[dict[str, float]]:
    """Relative L2 of what each layer's cache holds against what was to be written, K and V apart.

    Serves one prompt while every layer's K and V go into unquantised pages too.
    """
    spec, storage = engine.spec, engine.runner.storage
    exact = PageStorage(RowLayout.of(spec, FP32, FP32), storage.num_pages)
    kernels = engine.runner.model.kernels
    used: list[int] = []

    def both(x: Tensor, weights: Any, spec: Any, rope: Any, batch: Batch, pages: LayerPages) -> Any:
        layer = next(n for n, own in enumerate(storage.layers) if own is pages)
        used[:] = batch.block_tables[0].tolist()
        kernels.attention_inputs(x, weights, spec, rope, batch, exact.layers[layer])
        return kernels.attention_inputs(x, weights, spec, rope, batch, pages)

    engine.runner.model.kernels = replace(kernels, attention_inputs=both)
    driving.all_logits(engine, driving.prompt_of(LENGTH, VOCABULARY))

    def tokens(pages: Any) -> Tensor:
        whole = read(codec, pages, torch.tensor(used), torch.float32)
        return whole.transpose(1, 2).flatten(0, 1)[:LENGTH]

    return [
        {
            part: error(tokens(getattr(quantised, part)), tokens(getattr(plain, part)))
            for part in ("key", "value")
        }
        for quantised, plain in zip(storage.layers, exact.layers, strict=True)
    ]


def test_an_fp8_cache_with_scales_holds_k_and_v_of_every_layer_within_the_formats_tolerance(
    tmp_path: Path,
) -> None:
    engine = driving.engine(sized(tmp_path, **stored()), kv_format="fp8", num_pages=8)
    for layer, errors in enumerate(written_errors(engine)):
        for part, share in errors.items():
            assert 0 < share < FP8.tolerance, f"{part} of layer {layer}"
    assert engine.stats().values_clipped == 0


@pytest.mark.parametrize("wrong", ["K and V swapped", "layers shifted"])
def test_a_scale_used_for_another_tensor_would_be_noticed_in_all_of_them(
    tmp_path: Path, wrong: str
) -> None:
    scales = {
        "K and V swapped": tuple(CacheScales(own.value, own.key) for own in SCALES),
        "layers shifted": (*SCALES[1:], SCALES[0]),
    }[wrong]
    engine = driving.engine(sized(tmp_path, **stored(scales)), kv_format="fp8", num_pages=8)
    for errors in written_errors(engine):
        assert min(errors.values()) > 2 * FP8.tolerance


def test_keys_beyond_448_clip_without_a_scale_and_not_with_one_of_4(tmp_path: Path) -> None:
    assert SCALES[0].key == 4.0
    largest = {}
    for name, scales in (("with", stored()), ("without", {})):
        directory = sized(tmp_path / name, **scales)
        engine = driving.engine(directory, kv_format="fp8", num_pages=8)
        driving.all_logits(engine, driving.prompt_of(LENGTH, VOCABULARY))
        key = engine.runner.storage.layers[0].key
        held = read(codec, key, torch.arange(1, 8), torch.float32)
        largest[name] = float(held[held.isfinite()].abs().max())
        assert bool(key.clipping.clipped) == (name == "without")
    assert largest["without"] == 448.0
    assert largest["with"] > 448.0


@pytest.mark.parametrize(
    ("kv", "with_scales", "used", "line"),
    [
        ("fp8", True, True, "KV cache in fp8 with tensor scales from the checkpoint"),
        (
            "fp8",
            False,
            False,
            "KV cache in fp8 with a tensor scale of 1.0, as the checkpoint has none",
        ),
        (
            "nvfp4",
            True,
            False,
            "KV cache in nvfp4 with a tensor scale of 1.0, as its groups have their own",
        ),
        ("model", True, False, None),
    ],
)
def test_scales_are_for_an_fp8_cache_only_and_the_log_says_which(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kv: str,
    with_scales: bool,
    used: bool,
    line: str | None,
) -> None:
    build(tmp_path, "hub", extra=stored() if with_scales else {})
    with caplog.at_level(logging.INFO, logger="winnow"):
        engine = driving.engine(tmp_path, kv_format=kv, index_format="fp8", num_pages=4)
    layers = engine.runner.storage.layers
    held = [(own.key.global_scale, own.value.global_scale) for own in layers]
    assert held == [(own.key, own.value) if used else (1.0, 1.0) for own in SCALES]
    assert all(own.index is None or own.index.global_scale == 1.0 for own in layers)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("KV cache")]
    assert said == ([line] if line else [])


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("forms", [("nvfp4", "mxfp8"), ("keep", "keep")])
def test_converting_keeps_scales_as_they_are(
    tmp_path: Path, forms: tuple[str, str], shape: tuple[int, ...]
) -> None:
    scales = stored(shape=shape)
    build(tmp_path / "plain", "hub", extra=scales)
    convert(tmp_path / "plain", tmp_path / "it", *forms, progress=False)
    written = load_file(tmp_path / "it" / "model.safetensors")
    for name, scale in scales.items():
        kept = written[f"language_model.{name}"]
        assert (kept.shape, kept.dtype) == (scale.shape, scale.dtype)
        assert torch.equal(kept, scale)
    assert load_scales(tmp_path / "it") == SCALES
