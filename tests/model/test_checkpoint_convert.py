"""Converting: the quantised values are exactly the codec's, the rest is untouched, and a failure
leaves nothing behind."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import EXPERTS, LAYERS, build
from torch import Tensor

from winnow.errors import CheckpointError, UnsupportedError
from winnow.model.checkpoint import convert, load_checkpoint, make_tiny, read_spec
from winnow.model.checkpoint.writer import ShardWriter
from winnow.model.weights import ModelWeights
from winnow.ops.codec import (
    dequantise_mxfp8,
    dequantise_nvfp4,
    nvfp4_global_scale,
    quantise_mxfp8,
    quantise_nvfp4,
)
from winnow.ops.weights import MoeWeights, Mxfp8Weight, Nvfp4Weight, PlainWeight, Weight
from winnow.spec.formats import MXFP8, NVFP4


def load(directory: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_checkpoint(directory, read_spec(directory), dtype, progress=False)


def stored(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def plain(weight: Weight) -> Tensor:
    """fp32 values of a loaded weight."""
    match weight:
        case PlainWeight(data):
            return data.float()
        case Mxfp8Weight(codes, scales):
            return dequantise_mxfp8(codes, scales)
        case Nvfp4Weight(codes, scales, global_scales):
            return dequantise_nvfp4(codes, scales, global_scales[..., None])


def through_mxfp8(x: Tensor) -> Tensor:
    return dequantise_mxfp8(*quantise_mxfp8(x, strict=True))


def through_nvfp4(x: Tensor) -> Tensor:
    """With the global scale that survives being stored as its reciprocal."""
    scale = nvfp4_global_scale(x).reciprocal().reciprocal()
    return dequantise_nvfp4(*quantise_nvfp4(x, scale, strict=True), scale)


def same_bits(got: Tensor, want: Tensor) -> bool:
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return False
    a, b = (tensor.flatten().view(torch.uint8) for tensor in (got, want))
    return torch.equal(a, b)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float(torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want))


def moe(model: ModelWeights, layer: int) -> MoeWeights:
    mlp = model.layers[layer].mlp
    assert isinstance(mlp, MoeWeights)
    return mlp


@pytest.mark.parametrize("kind", ["hub", "hub-prefixed", "transformers-text"])
def test_converted_weights_are_bit_for_bit_the_codecs(tmp_path: Path, kind: str) -> None:
    build(tmp_path / "plain", kind)
    convert(tmp_path / "plain", tmp_path / "mixed", progress=False)
    assert read_spec(tmp_path / "mixed").quantization == "mixed-nvfp4"
    before, after = load(tmp_path / "plain"), load(tmp_path / "mixed")
    for layer in range(LAYERS):
        old, new = before.layers[layer].attention, after.layers[layer].attention
        pairs = [(old.qkv, new.qkv), (old.out, new.out)]
        if old.index is not None and new.index is not None:
            pairs.append((old.index, new.index))
        if layer > 0:
            theirs, ours = moe(before, layer).shared, moe(after, layer).shared
            pairs += [(theirs.gate_up, ours.gate_up), (theirs.down, ours.down)]
        for source, result in pairs:
            assert isinstance(result, Mxfp8Weight)
            assert same_bits(plain(result), through_mxfp8(plain(source)))
            assert relative_error(plain(result), plain(source)) < MXFP8.tolerance
    for layer in range(1, LAYERS):
        for role in ("gate_up", "down"):
            source, result = getattr(moe(before, layer), role), getattr(moe(after, layer), role)
            assert isinstance(result, Nvfp4Weight)
            for number in range(EXPERTS):
                original, got = plain(source)[number], plain(result)[number]
                assert same_bits(got, through_nvfp4(original))
                assert relative_error(got, original) < NVFP4.tolerance


@pytest.mark.parametrize("kind", ["hub", "hub-prefixed", "transformers-text"])
def test_everything_that_is_not_quantised_keeps_its_bits_under_the_hubs_names(
    tmp_path: Path, kind: str
) -> None:
    extra = {
        "vision_tower.x.weight": torch.randn(3, 5),
        "model.mtp.layers.0.mlp.gate_proj.weight": torch.randn(2, 2),
    }
    source = build(tmp_path / "plain", kind, extra=extra)
    convert(tmp_path / "plain", tmp_path / "mixed", progress=False)
    written = stored(tmp_path / "mixed")
    for name, tensor in extra.items():
        assert torch.equal(written.pop(name), tensor)
    assert all(name.startswith("language_model.") for name in written)
    words = ("norm", "embed", "lm_head", "moe.gate.", "bias")
    kept = {name: t for name, t in source.tensors.items() if any(word in name for word in words)}
    assert len(kept) == 3 + LAYERS * 4 + (LAYERS - 1) * 4
    for name, tensor in kept.items():
        assert same_bits(written[f"language_model.{name}"], tensor)


def test_experts_are_written_in_the_packed_form_with_encode_scales(tmp_path: Path) -> None:
    source = build(tmp_path / "plain", "hub")
    convert(tmp_path / "plain", tmp_path / "mixed", progress=False)
    written = stored(tmp_path / "mixed")
    name = "model.layers.1.block_sparse_moe.experts.2"
    suffixes = {
        key.removeprefix(f"language_model.{name}.w1") for key in written if f"{name}.w1" in key
    }
    assert suffixes == {
        ".weight_packed",
        ".weight_scale",
        ".weight_global_scale",
        ".input_global_scale",
    }
    scales = [written[f"language_model.{name}.{w}.weight_global_scale"] for w in ("w1", "w3")]
    amax = max(source.tensors[f"{name}.{w}.weight"].abs().max() for w in ("w1", "w3"))
    # Gate and up share the scale of the larger, which puts its largest value at 6 * 448.
    assert torch.equal(scales[0], scales[1])
    assert float(scales[0] * amax) == pytest.approx(6 * 448)
    config = json.loads((tmp_path / "mixed" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "mxfp8",
        "weight_block_size": [1, 32],
        "moe_quant_algo": "NVFP4",
        "moe_quant_format": "nvfp4-pack-quantized",
        "moe_quant_group_size": 16,
    }


@pytest.mark.parametrize(
    ("experts", "linear", "quantization"),
    [
        ("keep", "mxfp8", "mxfp8"),
        ("nvfp4", "keep", "mixed-nvfp4"),
        ("keep", "keep", "none"),
    ],
)
def test_experts_and_linears_can_be_kept_apart(
    tmp_path: Path, experts: str, linear: str, quantization: str
) -> None:
    build(tmp_path / "plain", "transformers-text")
    convert(tmp_path / "plain", tmp_path / "it", experts, linear, progress=False)
    assert read_spec(tmp_path / "it").quantization == quantization
    before, after = load(tmp_path / "plain"), load(tmp_path / "it")
    for kept, source, result in (
        (experts == "keep", moe(before, 1).gate_up, moe(after, 1).gate_up),
        (linear == "keep", moe(before, 1).shared.gate_up, moe(after, 1).shared.gate_up),
        (linear == "keep", before.layers[0].attention.qkv, after.layers[0].attention.qkv),
    ):
        assert isinstance(result, PlainWeight) == kept
        assert torch.equal(plain(result), plain(source)) == kept


@pytest.mark.parametrize("kind", ["mxfp8", "modelopt-nvfp4", "mixed-nvfp4"])
def test_a_quantised_checkpoint_can_be_copied_but_not_quantised_again(
    tmp_path: Path, kind: str
) -> None:
    build(tmp_path / "source", kind)
    for experts, linear in (("nvfp4", "keep"), ("keep", "mxfp8"), ("nvfp4", "mxfp8")):
        with pytest.raises(UnsupportedError, match=rf"quantised already \({kind}\)"):
            convert(tmp_path / "source", tmp_path / "it", experts, linear, progress=False)
    convert(tmp_path / "source", tmp_path / "it", "keep", "keep", progress=False)
    before, after = stored(tmp_path / "source"), stored(tmp_path / "it")
    assert before.keys() == after.keys()
    assert all(same_bits(after[name], tensor) for name, tensor in before.items())


def test_columns_that_do_not_fill_groups_stay_plain_and_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny(tmp_path / "plain", shared_width=40, num_layers=2)
    with caplog.at_level(logging.INFO, logger="winnow"):
        convert(tmp_path / "plain", tmp_path / "mixed", progress=False)
    shared = moe(load(tmp_path / "mixed"), 1).shared
    assert isinstance(shared.down, PlainWeight)
    assert isinstance(shared.gate_up, Mxfp8Weight)
    assert any(
        "1 matrices stay plain" in r.getMessage() and "shared_experts.down_proj" in r.getMessage()
        for r in caplog.records
    )


def test_that_activations_are_not_calibrated_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(tmp_path / "plain", "hub")
    with caplog.at_level(logging.INFO, logger="winnow"):
        convert(tmp_path / "plain", tmp_path / "mixed", progress=False)
    (record,) = caplog.records
    assert f"{(LAYERS - 1) * EXPERTS * 3} .input_global_scale are 1.0" in record.getMessage()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path, bad: float) -> None:
    name = "model.layers.2.block_sparse_moe.experts.1.w3.weight"
    tensor = build(tmp_path / "plain", "hub").tensors[name]
    tensor[3, 5] = bad
    build(tmp_path / "plain", "hub", extra={name: tensor})
    with pytest.raises(CheckpointError, match=rf"{name} has 1 values that are not finite"):
        convert(tmp_path / "plain", tmp_path / "mixed", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_an_interrupted_conversion_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "plain", "hub")

    def interrupt(self: ShardWriter) -> None:
        assert any((tmp_path / self.directory).iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "plain", tmp_path / "mixed", progress=False, shard_bytes=50_000)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_destination_that_is_not_empty_is_refused_and_untouched(tmp_path: Path) -> None:
    build(tmp_path / "plain", "hub")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UnsupportedError, match="exists and is not empty"):
        convert(tmp_path / "plain", tmp_path / "full", progress=False)
    with pytest.raises(UnsupportedError, match="exists and is not empty"):
        convert(tmp_path / "plain", tmp_path / "plain", progress=False)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "plain", tmp_path / "empty", progress=False)
    load(tmp_path / "empty")


@pytest.mark.parametrize(
    ("experts", "linear", "message"),
    [("fp8", "mxfp8", "experts 'fp8' .* nvfp4 or keep"), ("keep", "q4", "linear 'q4' .* mxfp8 or")],
)
def test_an_unknown_word_is_refused_with_the_known_ones(
    tmp_path: Path, experts: str, linear: str, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        convert(tmp_path, tmp_path / "it", experts, linear, progress=False)


def test_shards_are_bounded_and_indexed_and_load_as_one_file_does(tmp_path: Path) -> None:
    build(tmp_path / "plain", "hub", shards=3)
    convert(tmp_path / "plain", tmp_path / "one", progress=False)
    convert(tmp_path / "plain", tmp_path / "many", progress=False, shard_bytes=30_000)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    one, many = stored(tmp_path / "one"), stored(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(same_bits(many[name], tensor) for name, tensor in one.items())
    for file in files:
        tensors = load_file(tmp_path / "many" / file).values()
        assert sum(tensor.nbytes for tensor in tensors) <= 30_000
        assert (tmp_path / "many" / file).stat().st_mode & 0o666 == 0o666 & (
            (tmp_path / "many").stat().st_mode
        )
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == one.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    load(tmp_path / "many")


def test_tokenizer_and_template_are_taken_over(tmp_path: Path) -> None:
    make_tiny(tmp_path / "plain", num_layers=2)
    (tmp_path / "plain" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "plain" / "README.md").write_text("not taken over")
    convert(tmp_path / "plain", tmp_path / "mixed", progress=False)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "mixed" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert (tmp_path / "mixed" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "mixed" / "README.md").exists()


def test_a_config_with_a_text_part_says_once_what_is_quantised(tmp_path: Path) -> None:
    make_tiny(tmp_path / "plain", num_layers=2)
    path = tmp_path / "plain" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["quantization_config"] = None
    path.write_text(json.dumps(config))
    convert(tmp_path / "plain", tmp_path / "mixed", progress=False)
    assert read_spec(tmp_path / "mixed").quantization == "mixed-nvfp4"
    written = json.loads((tmp_path / "mixed" / "config.json").read_text())
    del written["quantization_config"], config["text_config"]["quantization_config"]
    assert written == config
