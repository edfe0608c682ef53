"""The model that is trained is the model that is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import driving
from torch.nn.attention.flex_attention import flex_attention

from train.attention import Selector, _block_mask, _masked
from train.evaluate import quantise_weights
from train.export import hub_tensors
from train.geometry import Geometry, config, spec
from train.losses import block_mass, indexer_loss
from train.model import DemoModel, LayerProbe, State
from winnow.model.checkpoint import convert
from winnow.model.checkpoint.writer import save

GEOMETRY = Geometry(
    vocab_size=256, hidden_size=64, num_layers=3, num_heads=4, head_dim=32, index_dim=32,
    topk_blocks=2, num_experts=8, expert_width=32, shared_width=32, dense_width=64,
    max_positions=4096,
)  # fmt: skip


def model() -> DemoModel:
    """Random, and with no part that is zero, as a new model has."""
    torch.manual_seed(0)
    made = DemoModel(spec(GEOMETRY), torch.float32)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(0.0, 0.2)
            elif "o_proj" in name or "down_proj" in name or "w2" in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        for name, buffer in made.named_buffers():
            assert name.endswith("e_score_correction_bias")
            buffer.normal_(0.0, 0.1)
    return made


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain, mixed = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("x") / "mixed"
    save(hub_tensors(model().state_dict()), plain / "model.safetensors")
    import json

    (plain / "config.json").write_text(json.dumps(config(GEOMETRY, 0, 1)))
    convert(plain, mixed, progress=False)
    return mixed


@pytest.mark.parametrize("formats", [("model", "model"), ("nvfp4", "nvfp4"), ("fp8", "model")])
def test_logits_of_the_trained_model_are_those_of_the_served_checkpoint(
    exported: Path, formats: tuple[str, str]
) -> None:
    ours = model()
    quantise_weights(ours)
    prompt = driving.prompt_of(640, GEOMETRY.vocab_size)
    state = State("sparse", *formats, exact_scores=True)
    with torch.no_grad():
        hidden = ours(torch.tensor([prompt]), state).hidden
        expected = ours.logits(hidden)
    engine = driving.engine(
        exported, dtype="float32", kv_format=formats[0], index_format=formats[1], num_pages=16
    )
    logits, _ = driving.all_logits(engine, prompt)
    assert (logits - expected).abs().max() < 1e-3 * expected.abs().max()


def test_weights_quantised_while_training_are_those_put_in_place_afterwards() -> None:
    ids = torch.tensor([driving.prompt_of(256, GEOMETRY.vocab_size)])
    training, shipped = model(), model()
    quantise_weights(shipped)
    for name in ("embed_tokens", "lm_head.weight"):
        training.get_parameter(name).data.copy_(shipped.get_parameter(name).data)
    with torch.no_grad():
        a = training(ids, State("sparse", quantised_weights=True)).hidden
        b = shipped(ids, State("sparse")).hidden
    assert torch.allclose(a, b, atol=1e-5)


def test_selection_is_the_current_block_and_the_best_before_it_and_ties_go_to_the_lower() -> None:
    index_q = torch.ones(1, 1, 512, 4)
    index_k = torch.zeros(1, 1, 512, 4)
    index_k[:, :, 128:256] = 1.0
    chosen = Selector(2, compiled=False)(index_q, index_k, "sparse", exact=True)[0, 0]
    assert chosen[100].tolist() == [True, False, False, False]
    assert chosen[200].tolist() == [True, True, False, False]
    assert chosen[511].tolist() == [False, True, False, True]
    index_k.zero_()
    tied = Selector(2, compiled=False)(index_q, index_k, "sparse", exact=True)[0, 0]
    assert tied[511].tolist() == [True, False, False, True]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_tiles_of_the_block_mask_hold_every_selected_pair() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 512, 16) for heads in (4, 2, 2))
    index = torch.randn(2, 2, 512, 8), torch.randn(2, 1, 512, 8)
    selected = Selector(2, compiled=False)(*index, "sparse", exact=True)
    tiled = flex_attention(q, k, v, block_mask=_block_mask(selected, 4), enable_gqa=True)
    assert torch.allclose(tiled, _masked(q, k, v, selected), atol=1e-5)


def _probe(index_q: torch.Tensor, index_k: torch.Tensor) -> LayerProbe:
    torch.manual_seed(1)
    return LayerProbe(
        torch.randn(1, 4, 512, 16), torch.randn(1, 2, 512, 16), index_q, index_k, None
    )


def test_the_mass_of_all_visible_blocks_is_one() -> None:
    probe = _probe(torch.zeros(1), torch.zeros(1))
    mass = block_mass(probe.q, probe.k, torch.tensor([[5, 300, 511]]))
    assert torch.allclose(mass.sum(-1), torch.ones(1, 2, 3))
    assert mass[0, :, 0, 1:].abs().max() == 0


def test_the_indexer_learns_where_attention_looks() -> None:
    torch.manual_seed(2)
    index_q = torch.randn(1, 2, 512, 8, requires_grad=True)
    index_k = torch.randn(1, 1, 512, 8, requires_grad=True)
    probe, rows = _probe(index_q, index_k), torch.arange(256, 512, 8).unsqueeze(0)
    optimiser = torch.optim.Adam([index_q, index_k], lr=0.1)
    losses = []
    for _ in range(40):
        loss = indexer_loss(probe, rows)
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < 0.2 * losses[0]
