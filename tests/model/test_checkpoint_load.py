"""Loading: every kind of checkpoint gives the stored values in the right rows, and nothing more."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path

import pytest
import torch
from support.checkpoints import EXPERTS, KINDS, LAYERS, SmallCheckpoint, build
from torch import Tensor

from winnow.errors import CheckpointError
from winnow.model.checkpoint import load_checkpoint, read_spec
from winnow.model.checkpoint.reader import CheckpointFiles
from winnow.model.weights import ModelWeights
from winnow.ops.weights import MlpWeights, MoeWeights, Mxfp8Weight, Nvfp4Weight, PlainWeight, Weight


def load(checkpoint: SmallCheckpoint, dtype: torch.dtype = torch.bfloat16) -> ModelWeights:
    spec = read_spec(checkpoint.directory)
    return load_checkpoint(checkpoint.directory, spec, dtype, progress=False)


def same(got: Tensor, want: Tensor) -> None:
    """Equal bit for bit, shape and dtype included."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8))


def check(weight: Weight, tensors: dict[str, Tensor], names: list[str]) -> None:
    """A weight holds the pieces `names`, top row first."""

    def stacked(suffix: str) -> Tensor:
        parts = [tensors[name + suffix] for name in names]
        raw = [p.view(torch.uint8) if p.element_size() == 1 else p for p in parts]
        return torch.cat(raw).view(parts[0].dtype)

    match weight:
        case PlainWeight(data):
            same(data, stacked(".weight").to(data.dtype))
        case Mxfp8Weight(codes, scales):
            same(codes, stacked(".weight"))
            same(scales, stacked(".weight_scale_inv").view(torch.uint8))
        case Nvfp4Weight(codes, scales, global_scales):
            packed = f"{names[0]}.weight_packed" in tensors
            same(codes, stacked(".weight_packed" if packed else ".weight"))
            same(scales, stacked(".weight_scale"))
            row = 0
            for name in names:
                scale = (
                    1 / tensors[f"{name}.weight_global_scale"]
                    if packed
                    else tensors[f"{name}.weight_scale_2"]
                )
                rows = tensors[f"{name}.weight_scale"].shape[0]
                same(global_scales[row : row + rows], scale.expand(rows))
                row += rows
            assert row == global_scales.shape[0]


def one_expert(weight: Weight, number: int) -> Weight:
    match weight:
        case PlainWeight(data):
            return PlainWeight(data[number])
        case Mxfp8Weight(codes, scales):
            return Mxfp8Weight(codes[number], scales[number])
        case Nvfp4Weight(codes, scales, global_scales):
            return Nvfp4Weight(codes[number], scales[number], global_scales[number])


def check_model(model: ModelWeights, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Every tensor of a small checkpoint is where it belongs."""
    same(model.embedding, tensors["model.embed_tokens.weight"].to(dtype))
    same(model.head.data, tensors["lm_head.weight"].to(dtype))
    same(model.final_norm, tensors["model.norm.weight"].float())
    assert len(model.layers) == LAYERS
    for number, layer in enumerate(model.layers):
        root = f"model.layers.{number}"
        attention, held = f"{root}.self_attn", layer.attention
        same(layer.input_norm, tensors[f"{root}.input_layernorm.weight"].float())
        same(layer.post_norm, tensors[f"{root}.post_attention_layernorm.weight"].float())
        check(held.qkv, tensors, [f"{attention}.{p}_proj" for p in "qkv"])
        check(held.out, tensors, [f"{attention}.o_proj"])
        same(held.q_norm, tensors[f"{attention}.q_norm.weight"].float())
        same(held.k_norm, tensors[f"{attention}.k_norm.weight"].float())
        if number == 0:
            assert held.index is held.index_q_norm is held.index_k_norm is None
            assert isinstance(layer.mlp, MlpWeights)
            check_mlp(layer.mlp, tensors, f"{root}.mlp")
            continue
        assert held.index is not None
        assert held.index_q_norm is not None
        assert held.index_k_norm is not None
        check(held.index, tensors, [f"{attention}.index_{p}_proj" for p in "qk"])
        same(held.index_q_norm, tensors[f"{attention}.index_q_norm.weight"].float())
        same(held.index_k_norm, tensors[f"{attention}.index_k_norm.weight"].float())
        moe = f"{root}.block_sparse_moe"
        assert isinstance(layer.mlp, MoeWeights)
        same(layer.mlp.router, tensors[f"{moe}.gate.weight"].float())
        same(layer.mlp.router_bias, tensors[f"{moe}.e_score_correction_bias"].float())
        check_mlp(layer.mlp.shared, tensors, f"{moe}.shared_experts")
        for expert in range(EXPERTS):
            name = f"{moe}.experts.{expert}"
            check(one_expert(layer.mlp.gate_up, expert), tensors, [f"{name}.w1", f"{name}.w3"])
            check(one_expert(layer.mlp.down, expert), tensors, [f"{name}.w2"])


def check_mlp(mlp: MlpWeights, tensors: dict[str, Tensor], root: str) -> None:
    check(mlp.gate_up, tensors, [f"{root}.gate_proj", f"{root}.up_proj"])
    check(mlp.down, tensors, [f"{root}.down_proj"])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_with_each_tensor_in_its_rows(
    tmp_path: Path, kind: str, shards: int
) -> None:
    checkpoint = build(tmp_path, kind, shards=shards)
    check_model(load(checkpoint), checkpoint.tensors, torch.bfloat16)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weights_come_in_the_compute_dtype_and_norms_and_router_in_fp32(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    checkpoint = build(tmp_path, "hub", dtype=stored)
    check_model(load(checkpoint, dtype), checkpoint.tensors, dtype)


def test_forms_are_held_as_they_are_stored(tmp_path: Path) -> None:
    layer = load(build(tmp_path, "mixed-nvfp4")).layers[1]
    assert isinstance(layer.mlp, MoeWeights)
    assert isinstance(layer.mlp.gate_up, Nvfp4Weight)
    assert isinstance(layer.mlp.down, Nvfp4Weight)
    assert isinstance(layer.mlp.shared.down, Mxfp8Weight)
    assert isinstance(layer.attention.index, Mxfp8Weight)


def test_linears_may_be_nvfp4_where_they_are_so_named(tmp_path: Path) -> None:
    name = "language_model.model.layers.1.block_sparse_moe.shared_experts.down_proj"
    donor = "model.layers.1.block_sparse_moe.experts.0.w2"
    checkpoint = build(tmp_path / "donor", "mixed-nvfp4")
    repeat = 3  # SHARED_WIDTH / EXPERT_WIDTH
    packed = checkpoint.tensors[f"{donor}.weight_packed"].repeat(1, repeat)
    scales = checkpoint.tensors[f"{donor}.weight_scale"].view(torch.uint8).repeat(1, repeat)
    extra = {
        f"{name}.weight_packed": packed,
        f"{name}.weight_scale": scales.view(torch.float8_e4m3fn),
        f"{name}.weight_global_scale": torch.tensor([4.0]),
    }
    drop = (f"{name}.weight", f"{name}.weight_scale_inv")
    mlp = load(build(tmp_path / "it", "mixed-nvfp4", extra=extra, drop=drop)).layers[1].mlp
    assert isinstance(mlp, MoeWeights)
    assert isinstance(mlp.shared.down, Nvfp4Weight)
    same(mlp.shared.down.codes, packed)
    assert mlp.shared.down.global_scales.tolist() == [0.25] * 64


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    model = load(build(tmp_path, "hub", drop=("lm_head.weight",), tie_word_embeddings=True))
    assert model.head.data.data_ptr() == model.embedding.data_ptr()


def test_a_tied_head_that_is_stored_must_equal_the_embedding(tmp_path: Path) -> None:
    made = build(tmp_path / "untied", "hub").tensors["model.embed_tokens.weight"]
    equal = {"lm_head.weight": made.clone()}
    model = load(build(tmp_path / "equal", "hub", extra=equal, tie_word_embeddings=True))
    assert model.head.data.data_ptr() == model.embedding.data_ptr()
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has \d+ values unlike"):
        load(build(tmp_path / "other", "hub", tie_word_embeddings=True))


@pytest.mark.parametrize("kind", ["hub", "transformers-text", "mixed-nvfp4"])
def test_loading_never_holds_more_than_the_largest_stored_tensor_beside_the_model(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = build(tmp_path, kind)
    original = CheckpointFiles.read
    alive: list[weakref.ref[Tensor]] = []
    peaks: list[int] = []

    def counting(self: CheckpointFiles, name: str, index: int | None = None) -> Tensor:
        tensor = original(self, name, index)
        alive.append(weakref.ref(tensor))
        held = (ref() for ref in alive)
        peaks.append(sum(t.untyped_storage().nbytes() for t in held if t is not None))
        return tensor

    monkeypatch.setattr(CheckpointFiles, "read", counting)
    load(checkpoint)
    # Of a stack of experts only one may be read at a time.
    infos = CheckpointFiles(tmp_path).tensors.values()
    sizes = [info.nbytes for info in infos if len(info.shape) < 3]
    assert max(peaks) <= max(sizes)
    assert len(peaks) > LAYERS * EXPERTS


def test_reading_maps_no_file(tmp_path: Path) -> None:
    build(tmp_path, "hub")
    files = CheckpointFiles(tmp_path)
    before = files.read("lm_head.weight").clone()
    held = files.read("lm_head.weight")
    content = (tmp_path / "model.safetensors").read_bytes()
    with (tmp_path / "model.safetensors").open("r+b") as stream:
        stream.write(bytes(len(content)))
    assert torch.equal(held, before)


def test_other_models_tensors_are_skipped_with_one_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = (
        "vision_tower.vision_model.pre_layrnorm.weight",
        "vision_tower.vision_model.pre_layrnorm.bias",
        "model.vision_tower.patch.weight",
        "multi_modal_projector.linear_1.weight",
        "model.multi_modal_projector.linear_2.weight",
        "patch_merge_mlp.linear_1.bias",
        "model.mtp.layers.0.input_layernorm.weight",
        "language_model.model.mtp.norm.weight",
        "dspark.layers.0.self_attn.q_proj.weight",
        "model.language_model.dspark.markov.weight",
    )
    checkpoint = build(tmp_path, "hub-prefixed", extra={name: torch.ones(1) for name in names})
    with caplog.at_level(logging.INFO, logger="winnow"):
        load(checkpoint)
    lines = [record.getMessage().removeprefix(f"{tmp_path}: ") for record in caplog.records]
    assert lines == [
        "skipped 3 tensors of vision_tower",
        "skipped 2 tensors of multi_modal_projector",
        "skipped 1 tensors of patch_merge_mlp",
        "skipped 2 tensors of mtp",
        "skipped 2 tensors of dspark",
    ]


@pytest.mark.parametrize("kind", ["modelopt-nvfp4", "mixed-nvfp4"])
def test_activation_scales_are_said_once_not_to_be_used(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="winnow"):
        load(build(tmp_path, kind))
    (record,) = caplog.records
    says = f"activations keep the compute dtype, so {2 * EXPERTS * 3} scales for them ("
    assert says in record.getMessage()


def test_activation_scales_may_be_absent(tmp_path: Path) -> None:
    made = build(tmp_path / "all", "modelopt-nvfp4").tensors
    drop = tuple(f"language_model.{name}" for name in made if name.endswith(".input_scale"))
    checkpoint = build(tmp_path / "none", "modelopt-nvfp4", drop=drop)
    check_model(load(checkpoint), made, torch.bfloat16)


def test_no_progress_bar_is_drawn_where_stderr_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = build(tmp_path, "hub")
    load_checkpoint(tmp_path, read_spec(checkpoint.directory), torch.float32, progress=True)
    assert capsys.readouterr().err == ""
