"""Reading a config: both dialects, their quirks, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from winnow.errors import CheckpointError, UnsupportedError
from winnow.spec import presets
from winnow.spec.model import ModelSpec

HUB = presets._PRESETS["minimax-m3"]
OWN: dict[str, Any] = {
    "model_type": "minimax_m3_vl_text",
    "vocab_size": 200064,
    "hidden_size": 6144,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rotary_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5_000_000,
        "partial_rotary_factor": 0.5,
    },
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 524288,
    "dense_intermediate_size": 12288,
    "intermediate_size": 3072,
    "shared_intermediate_size": 3072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "swiglu_beta": 1.0,
    "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "quantization_config": HUB["quantization_config"],
    "bos_token_id": 200034,
    "eos_token_id": 200020,
}


def test_both_dialects_describe_the_same_model() -> None:
    assert ModelSpec.from_hf(HUB) == ModelSpec.from_hf(OWN)
    assert ModelSpec.from_hf({"text_config": OWN, "vision_config": {}}) == ModelSpec.from_hf(OWN)
    spec = ModelSpec.from_hf(HUB)
    assert spec.layer_is_sparse == (False,) * 3 + (True,) * 57
    assert spec.rotary_dim == 64
    assert spec.heads_per_kv_head == 16


def test_the_flash_preset_has_index_keys_in_every_layer() -> None:
    assert all(presets.preset("minimax-m3.1-flash").layer_is_sparse)
    with pytest.raises(UnsupportedError, match=r"no preset 'm4'; known: minimax-m3, "):
        presets.preset("m4")


@pytest.mark.parametrize(
    ("change", "rotary_dim", "noted"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}, 128, True),
        ({"rope_parameters": None, "rope_theta": 5e6}, 64, False),
        ({"rope_parameters": None, "partial_rotary_factor": 0.25}, 32, True),
        ({"rope_parameters": None, "rotary_dim": None}, 128, False),
        ({"rotary_dim": 32}, 64, True),
    ],
)
def test_the_rotated_share_follows_the_saving_library_and_says_where_sources_disagree(
    change: dict[str, Any], rotary_dim: int, noted: bool
) -> None:
    spec = ModelSpec.from_hf({**OWN, **change})
    assert spec.rotary_dim == rotary_dim
    assert any("rotary_dim" in note for note in spec.notes) == noted


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**OWN, "model_type": None},
            r"^config\.json lacks 'model_type': only models of MiniMax-M3",
        ),
        ({"text_config": {**OWN, "model_type": None}}, r"lacks 'model_type'"),
        ({"model_type": "other_omni", "text_config": OWN}, r": model_type is 'other_omni'"),
        (
            {"model_type": "minimax_m3_vl", "text_config": {**OWN, "model_type": "llama"}},
            r"text_config\.model_type is 'llama'",
        ),
    ],
)
def test_every_model_type_of_a_config_is_of_the_family_and_one_is_there(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ModelSpec.from_hf(config)


def test_a_wrapper_or_its_text_part_may_name_the_family() -> None:
    for wrapper, text in (("minimax_m3_vl", None), (None, "minimax_m3_vl_text")):
        config = {"model_type": wrapper, "text_config": {**OWN, "model_type": text}}
        assert ModelSpec.from_hf(config) == ModelSpec.from_hf(OWN)


def test_a_missing_beta_is_one() -> None:
    assert ModelSpec.from_hf({**OWN, "swiglu_beta": None}).swiglu_beta == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama': only models of MiniMax-M3's family"),
        ({"index_block_size": 64}, "blocks of 64 tokens"),
        ({"index_n_heads": 2}, "2 index heads for 4 KV heads"),
        ({"index_local_blocks": 2}, "2 local blocks"),
        ({"num_attention_heads": 66}, "66 heads do not divide"),
        ({"dtype": "float16"}, "dtype float16"),
        ({"layer_types": ["linear"] * 60}, "layer_types holds"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
        ({"use_gemma_norm": False}, "norms that are not Gemma's"),
        ({"num_experts_per_tok": 200}, "top-200 of 128 experts"),
        ({"sparse_attention_config": {"sparse_score_type": "mean"}}, "block score 'mean'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ModelSpec.from_hf({**OWN, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"vocab_size": "many"}, "'vocab_size' is 'many', not a whole number"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' is 'small', not a number"),
        ({"layer_types": ["full_attention"] * 59}, "describes 59 layers"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}},
            "cannot rotate 192 of 128",
        ),
    ],
)
def test_a_damaged_config_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelSpec.from_hf({**OWN, **change})


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (None, "none"),
        ({"quant_method": "mxfp8"}, "mxfp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt-nvfp4"),
        (presets._MIXED, "mixed-nvfp4"),
    ],
)
def test_each_kind_of_checkpoint_is_recognised(config: Any, kind: str) -> None:
    assert ModelSpec.from_hf({**OWN, "quantization_config": config}).quantization == kind


def test_a_cut_keeps_the_last_layers() -> None:
    cut = presets.preset("minimax-m3").with_layers(2)
    assert cut.layer_is_moe == cut.layer_is_sparse == (True, True)
    with pytest.raises(UnsupportedError, match="asked for 61 layers, the model has 60"):
        presets.preset("minimax-m3").with_layers(61)
