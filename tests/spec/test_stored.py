"""Sizes of checkpoints by named parts, against the published ones."""

from __future__ import annotations

import pytest

from winnow.errors import CheckpointError
from winnow.spec.formats import BF16, MXFP8, NVFP4, Format
from winnow.spec.memory import weight_bytes
from winnow.spec.presets import preset, preset_config
from winnow.spec.stored import checkpoint_bytes


@pytest.mark.parametrize(
    ("name", "experts", "published_gb"),
    [("minimax-m3", MXFP8, 451.5), ("minimax-m3.1-flash", NVFP4, 250.1)],
)
def test_a_checkpoint_is_as_large_as_published(
    name: str, experts: Format, published_gb: float
) -> None:
    parts = checkpoint_bytes(preset_config(name), preset(name), experts, MXFP8, BF16)
    assert round(sum(parts.values()) / 1e9, 1) == published_gb
    # Parameters of transformers 5.24's modules of the same names, at two bytes each.
    assert parts["vision_tower"] == 2 * 631_185_920
    assert parts["projector"] == 2 * 234_381_312


def test_an_mtp_module_is_a_layer_and_the_projection_into_it() -> None:
    """7.25e9 values of experts, 56.6e6 of the shared one, 106.6e6 of attention with its four norms,
    3.9e6 of the index, the router, and 2H x H: at 33/32 bytes where they are in MXFP8."""
    config = preset_config("minimax-m3")
    parts = checkpoint_bytes(config, preset("minimax-m3"), MXFP8, MXFP8, BF16)
    matrices = 128 * 3 * 3072 * 6144 + 3 * 3072 * 6144 + (72 + 64) * 128 * 6144 + 640 * 6144
    matrices += 2 * 6144 * 6144
    rest = 4 * 128 * 6145 + 4 * (3 * 6144 + 4 * 128) + 2 * 2 * 6144
    assert parts["mtp"] == matrices * 33 // 32 + rest
    doubled = {**config, "num_mtp_modules": 2}
    assert (
        checkpoint_bytes(doubled, preset("minimax-m3"), MXFP8, MXFP8, BF16)["mtp"]
        == 2 * parts["mtp"]
    )


def test_a_config_of_text_alone_stores_what_is_loaded() -> None:
    spec = preset("minimax-m3")
    parts = checkpoint_bytes({}, spec, BF16, BF16, BF16)
    assert parts == {
        **weight_bytes(spec, BF16, BF16, BF16), "vision_tower": 0, "projector": 0, "mtp": 0,
    }  # fmt: skip


def test_row_scales_are_made_when_loading_and_not_stored() -> None:
    spec = preset("minimax-m3.1-flash")
    stored = checkpoint_bytes({}, spec, NVFP4, MXFP8, BF16)["experts"]
    held = weight_bytes(spec, NVFP4, MXFP8, BF16)["experts"]
    assert held - stored == 57 * 128 * (2 * 3072 + 6144) * 4


@pytest.mark.parametrize("value", ["32", -1, True, 1.5])
def test_a_damaged_vision_config_is_named(value: object) -> None:
    config = {"vision_config": {"num_hidden_layers": value}}
    with pytest.raises(CheckpointError, match=r"'num_hidden_layers' is .*, not a whole number"):
        checkpoint_bytes(config, preset("minimax-m3"), MXFP8, MXFP8, BF16)
