"""The tiny checkpoint: complete, reproducible, and with a tokenizer that loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from winnow.errors import UnsupportedError
from winnow.model.checkpoint import load_checkpoint, make_tiny, read_spec
from winnow.model.checkpoint.tiny_config import TAGS, byte_tokenizer
from winnow.ops.weights import MoeWeights

TOKENIZER = byte_tokenizer()


def test_the_tiny_checkpoint_is_a_small_m3_and_loads(tmp_path: Path) -> None:
    spec = make_tiny(tmp_path)
    assert spec == read_spec(tmp_path)
    assert spec.layer_is_moe == spec.layer_is_sparse == (False, True, True, True)
    assert (spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (256, 8, 4)
    assert spec.rotary_dim * 2 == spec.head_dim
    assert spec.notes == ()
    model = load_checkpoint(tmp_path, spec, torch.bfloat16, progress=False)
    assert model.embedding.shape == (spec.vocab_size, 256)
    norms = torch.stack([layer.input_norm for layer in model.layers])
    assert norms.abs().min() < norms.abs().max() < 1
    moe = model.layers[1].mlp
    assert isinstance(moe, MoeWeights)
    assert 0 < moe.router_bias.abs().max() < 0.1


def test_the_same_seed_writes_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny(tmp_path / name, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_geometry_can_be_changed_by_name(tmp_path: Path) -> None:
    spec = make_tiny(tmp_path, num_layers=2, num_dense_layers=0, head_dim=64, num_experts=4)
    assert spec.layer_is_sparse == (True, True)
    assert (spec.head_dim, spec.num_experts) == (64, 4)
    load_checkpoint(tmp_path, spec, torch.bfloat16, progress=False)


def test_an_unknown_geometry_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no tiny geometry layers: use hidden_size, num_l"):
        make_tiny(tmp_path, layers=2)
    assert not list(tmp_path.iterdir())


def test_an_existing_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    with pytest.raises(UnsupportedError, match="already holds a checkpoint"):
        make_tiny(tmp_path)


@given(st.text())
def test_the_tokenizer_gives_back_every_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_a_token_is_a_byte_except_for_tags(tmp_path: Path) -> None:
    assert len(TOKENIZER.encode("aé€😀\n ").ids) == 1 + 2 + 3 + 4 + 1 + 1
    for tag in TAGS:
        (token,) = TOKENIZER.encode(tag).ids
        assert TOKENIZER.decode([token]) == tag


def test_every_id_of_the_vocabulary_has_a_token(tmp_path: Path) -> None:
    spec = make_tiny(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == spec.vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(spec.vocab_size))
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert tokenizer.id_to_token(spec.bos_id) == "]~!b["
    assert [tokenizer.id_to_token(i) for i in generation["eos_token_id"]] == ["[e~["]
