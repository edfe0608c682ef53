"""Damaged tensors: a wrong one is a CheckpointError that names file and tensor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.checkpoints import build
from torch import Tensor

from winnow.errors import CheckpointError, UnsupportedError
from winnow.model.checkpoint import load_checkpoint, read_spec

PREFIX = "language_model.model.layers.1"
Q = f"{PREFIX}.self_attn.q_proj"
W1 = f"{PREFIX}.block_sparse_moe.experts.2.w1"
FILE = r"model\.safetensors: tensor "

F8 = torch.float8_e4m3fn


def load(directory: Path) -> None:
    load_checkpoint(directory, read_spec(directory), torch.bfloat16, progress=False)


def nan_scales(shape: tuple[int, ...], code: int) -> Tensor:
    scales = torch.full(shape, 0x38, dtype=torch.uint8)
    scales[-1, -1] = code
    return scales


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "message"),
    [
        ("hub-prefixed", f"{Q}.weight", torch.ones(1, 64), r"q_proj\.weight: shape \[1, 64\], exp"),
        ("hub-prefixed", f"{Q}.weight", torch.ones(128, 64).half(), r"dtype F16, expected BF16 or"),
        ("hub-prefixed", f"{Q}.weight", torch.ones(128, 64).to(F8), r"dtype F8_E4M3, expected BF1"),
        ("hub-prefixed", f"{Q}.bias", torch.ones(128), r"q_proj\.bias is not understood: config"),
        ("hub-prefixed", f"{Q}.weight_scale_inv", torch.ones(128, 2), r"dtype BF16, expected F8_E"),
        (
            "hub-prefixed",
            f"{PREFIX}.input_layernorm.weight",
            torch.ones(32),
            r"norm\.weight: shape",
        ),
        (
            "hub-prefixed",
            f"{PREFIX}.input_layernorm.weight",
            torch.full((64,), torch.nan),
            r"input_layernorm\.weight has 64 values that are not finite",
        ),
        (
            "hub-prefixed",
            "model.layers.1.self_attn.q_proj.weight",
            torch.ones(128, 64),
            rf"{FILE}.* is the same as ",
        ),
        (
            "hub-prefixed",
            "language_model.model.layers.7.mlp.x",
            torch.ones(1),
            r"layers\.7\.mlp\.x is",
        ),
        ("hub-prefixed", "visions.weight", torch.ones(1), r"visions\.weight is not understood"),
        (
            "hub-prefixed",
            "rotary.vision_tower.x",
            torch.ones(1),
            r"vision_tower\.x is not understood",
        ),
        (
            "mxfp8",
            f"{Q}.weight",
            torch.ones(128, 64).half(),
            r"q_proj\.weight: dtype F16, expected F8",
        ),
        (
            "mxfp8",
            f"{Q}.weight_scale_inv",
            torch.ones(128, 2),
            r"dtype F32, expected U8 or F8_E8M0",
        ),
        (
            "mxfp8",
            f"{Q}.weight_scale_inv",
            torch.ones(128, 4).byte(),
            r"shape \[128, 4\], expected",
        ),
        (
            "mxfp8",
            f"{Q}.weight_scale_inv",
            nan_scales((128, 2), 255),
            r"scale_inv has 1 NaN scales",
        ),
        ("mxfp8", f"{Q}.input_scale", torch.tensor(1.0), r"q_proj\.input_scale is not understood"),
        (
            "modelopt-nvfp4",
            f"{W1}.weight",
            torch.ones(32, 64).to(F8),
            r"dtype F8_E4M3, expected U8",
        ),
        (
            "modelopt-nvfp4",
            f"{W1}.weight_scale",
            nan_scales((32, 4), 0xFF).view(F8),
            r"w1\.weight_scale has 1 NaN scales",
        ),
        ("modelopt-nvfp4", f"{W1}.weight_scale_2", torch.tensor(torch.inf), r"scale_2 is inf"),
        ("modelopt-nvfp4", f"{W1}.weight_scale_2", torch.tensor(-1.0), r"scale_2 is -1"),
        ("modelopt-nvfp4", f"{W1}.weight_scale_2", torch.ones(32), r"shape \[32\], expected \[\]"),
        ("mixed-nvfp4", f"{W1}.weight_global_scale", torch.tensor([0.0]), r"global_scale is 0\.0"),
        ("mixed-nvfp4", f"{W1}.weight_global_scale", torch.tensor([torch.nan]), r"_scale is nan"),
        ("mixed-nvfp4", f"{W1}.weight_global_scale", torch.tensor([torch.inf]), r"_scale is inf"),
        (
            "mixed-nvfp4",
            f"{W1}.weight_global_scale",
            torch.tensor([1e-40]),
            r"which is no global s",
        ),
        ("mixed-nvfp4", f"{W1}.weight_scale_2", torch.tensor(1.0), r"scale_2 is not understood"),
    ],
)
def test_a_wrong_tensor_is_named_with_its_file(
    tmp_path: Path, kind: str, name: str, tensor: Tensor, message: str
) -> None:
    build(tmp_path, kind, extra={name: tensor})
    with pytest.raises(CheckpointError, match=message) as raised:
        load(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}/model.safetensors: tensor ")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("hub-prefixed", "language_model.lm_head.weight"),
        ("hub-prefixed", "language_model.model.norm.weight"),
        ("hub-prefixed", f"{PREFIX}.block_sparse_moe.e_score_correction_bias"),
        ("hub-prefixed", f"{Q}.weight"),
        ("hub-prefixed", f"{W1}.weight"),
        ("transformers-text", "model.layers.2.mlp.experts.down_proj"),
        ("mxfp8", f"{Q}.weight"),
        ("modelopt-nvfp4", f"{W1}.weight_scale_2"),
        ("mixed-nvfp4", f"{W1}.weight_packed"),
        ("mixed-nvfp4", f"{W1}.weight_scale"),
        ("mixed-nvfp4", f"{W1}.weight_global_scale"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, kind: str, name: str) -> None:
    build(tmp_path, kind, drop=(name,))
    # A stack's absence is told by the first of the tensors that could stand for it; without packed
    # codes an expert is in no known form.
    told = {
        "model.layers.2.mlp.experts.down_proj": "model.layers.2.block_sparse_moe.experts.0.w2",
        f"{W1}.weight_packed": W1,
    }.get(name, name)
    wanted = re.escape(told.removeprefix("language_model."))
    with pytest.raises(CheckpointError, match=rf"{tmp_path} lacks tensor {wanted}"):
        load(tmp_path)


def test_mxfp8_without_its_scales_is_not_taken_for_plain(tmp_path: Path) -> None:
    build(tmp_path, "mxfp8", drop=(f"{Q}.weight_scale_inv",))
    with pytest.raises(CheckpointError, match=rf"{FILE}{Q}\.weight: dtype F8_E4M3, expected BF16"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("stored", "said", "form"),
    [
        ("mxfp8", "hub", "mxfp8"),
        ("modelopt-nvfp4", "mxfp8", "modelopt-nvfp4"),
        ("modelopt-nvfp4", "mixed", "modelopt-nvfp4"),
        ("mixed-nvfp4", "mxfp8", "nvfp4-pack-quantized"),
    ],
)
def test_a_form_that_the_config_does_not_announce_is_refused(
    tmp_path: Path, stored: str, said: str, form: str
) -> None:
    other = build(tmp_path / "other", said).config.get("quantization_config")
    build(tmp_path / "it", stored, quantization_config=other)
    with pytest.raises(CheckpointError, match=rf"is stored as {form}, but config\.json says"):
        load(tmp_path / "it")


def test_pieces_of_one_matrix_in_two_formats_are_refused(tmp_path: Path) -> None:
    build(
        tmp_path,
        "mxfp8",
        extra={f"{Q}.weight": torch.ones(128, 64)},
        drop=(f"{Q}.weight_scale_inv",),
    )
    with pytest.raises(
        UnsupportedError, match=r"k_proj.* is stored as mxfp8 and .*q_proj as plain"
    ):
        load(tmp_path)


def test_columns_that_do_not_fill_groups_are_refused(tmp_path: Path) -> None:
    name = f"{PREFIX}.block_sparse_moe.shared_experts.down_proj"
    build(tmp_path, "mxfp8", shared_intermediate_size=80)
    stored = {
        f"{PREFIX[:-1]}{layer}.block_sparse_moe.shared_experts.{part}": tensor
        for layer in (1, 2)
        for part, tensor in {
            "gate_proj.weight": torch.ones(80, 64).to(F8),
            "gate_proj.weight_scale_inv": torch.ones(80, 2).byte(),
            "up_proj.weight": torch.ones(80, 64).to(F8),
            "up_proj.weight_scale_inv": torch.ones(80, 2).byte(),
            "down_proj.weight": torch.ones(64, 80).to(F8),
            "down_proj.weight_scale_inv": torch.ones(64, 2).byte(),
        }.items()
    }
    build(tmp_path, "mxfp8", extra=stored, shared_intermediate_size=80)
    with pytest.raises(CheckpointError, match=rf"{name}\.weight .* 80 columns do not fill"):
        load(tmp_path)
