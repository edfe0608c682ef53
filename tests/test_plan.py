"""`winnow plan` as a user runs it, and its agreement with the engine to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.checkpoints import build
from support.command import winnow

from winnow.config import EngineConfig
from winnow.engine.build import build_engine
from winnow.model.checkpoint import convert
from winnow.model.weights import nbytes
from winnow.spec.cost import STEP_PARTS
from winnow.spec.presets import PRESETS

PUBLISHED = (
    *("--gpu", "b300", "--parallel", "dep4", "--context", "262144"),
    *("--kv", "nvfp4", "--index", "nvfp4", "--reserve-gb", "9", "--charge-index", "no"),
)


@pytest.mark.parametrize("kind", ["hub", "mxfp8", "modelopt-nvfp4", "mixed-nvfp4"])
def test_a_plan_of_a_checkpoint_is_what_an_engine_then_holds(tmp_path: Path, kind: str) -> None:
    build(tmp_path, kind)
    agree(tmp_path, "nvfp4", "fp8")


@pytest.mark.parametrize(("kv", "index"), [("model", "model"), ("fp8", "nvfp4")])
def test_a_plan_of_a_converted_checkpoint_is_what_an_engine_then_holds(
    tiny: Path, tmp_path: Path, kv: str, index: str
) -> None:
    convert(tiny, tmp_path / "small", experts="nvfp4", linear="mxfp8")
    agree(tmp_path / "small", kv, index)


def agree(directory: Path, kv: str, index: str) -> None:
    """Weights by part, bytes of a row and number of pages, from a plan and from an engine."""
    formats = ("--kv", kv, "--index", index, "--memory-fraction", "1", "--json")
    weights = winnow("plan", directory, *formats).json["weight_bytes"]
    # Memory for the weights and for a cache that ends in the middle of a page.
    cache_bytes = 5_000_001
    gpu = f"own={weights + cache_bytes}e-9"
    plan = winnow("plan", directory, *formats, "--gpu", gpu).json
    config = EngineConfig(
        cache_bytes=cache_bytes, kv_format=kv, index_format=index, dtype="bfloat16"
    )
    runner = build_engine(str(directory), config, progress=False).runner
    rows = runner.storage.rows
    assert plan["weights"] == nbytes(runner.model.weights)
    assert plan["row_bytes"] == rows.shape[1]
    assert plan["fit"]["num_pages"] == rows.shape[0]
    assert plan["fit"]["num_pages"] * plan["row_bytes"] == rows.nbytes
    assert plan["fit"]["usable_bytes"] == weights + cache_bytes


@pytest.mark.parametrize("name", PRESETS)
def test_the_parts_of_a_plan_add_up(name: str) -> None:
    plan = winnow("plan", name, "--json").json
    assert sum(plan["weights"].values()) == plan["weight_bytes"]
    assert sum(plan["checkpoint"].values()) == plan["checkpoint_bytes"]
    assert sum(plan["row_parts"].values()) == plan["row_bytes"]
    assert sum(plan["token_bytes"].values()) * 128 == plan["row_bytes"]
    assert plan["fit"] is plan["roofline"] is None
    text = winnow("plan", name).out
    assert f"{plan['weight_bytes']:,}" in text
    assert f"{plan['row_bytes']:,} bytes per page row of 128 tokens" in text
    assert "Fits" not in text
    assert "Decode" not in text


def test_the_published_capacity_is_printed_with_what_it_assumes() -> None:
    text = winnow("plan", "minimax-m3.1-flash", *PUBLISHED).out
    assert "76 sequences of 262,144 tokens in all, 19 in each group" in text
    assert "index cache NOT charged: its 4,320 bytes a token" in text
    assert "90% of 288.4 GB, of which 9.0 GB are kept" in text
    assert "dep4: 4 groups with sequences of their own" in text
    assert "250.1 GB" in text


def test_options_reach_the_plan() -> None:
    words = ("--gpus", "8", "--experts", "nvfp4", "--linear", "plain", "--gpu", "h200")
    settings = winnow("plan", "minimax-m3", *words, "--json").json["settings"]
    got = [settings[name] for name in ("gpus", "parallel", "experts", "linear", "gpu")]
    assert got == [8, "tp8", "nvfp4", "bf16", "h200"]


def test_the_published_row_is_printed() -> None:
    words = ("--parallel", "tp4", "--draft", "5", "--kv", "nvfp4", "--index", "nvfp4")
    text = winnow("plan", "minimax-m3.1-flash", *words).out
    assert "1,822,720 bytes per page row of 128 tokens in 125 pieces" in text
    assert "draft: K and V of 5 layers in fp8" in text


def test_a_draft_may_have_as_many_layers_as_its_model() -> None:
    assert winnow("plan", "minimax-m3", "--draft", "60").status == 0


def test_the_roofline_is_a_table_of_contexts_and_batches_and_of_parts() -> None:
    words = ("minimax-m3.1-flash", *PUBLISHED)
    floors = winnow("plan", *words, "--json").json["roofline"]["decode"]
    full = next(f for f in floors if (f["context"], f["batch"]) == (262_144, 76))
    text = winnow("plan", *words).out
    table = text.split("\nDecode step: ")[1]
    row = next(line for line in table.splitlines() if line.split()[0] == "262,144")
    assert f"{full['floor_us'] / 1000:.2f} {full['binds']}" in row
    # 128 requests of that length do not fit.
    assert row.count("*") == 2
    for batch in (1, 76):
        stack = text.split(f"\nDecode step at 262,144 tokens, batch {batch}\n")[1]
        parts = [line.split()[0] for line in stack.split("\n\n")[0].splitlines()[1:]]
        assert parts == [*(p for p in STEP_PARTS if p != "dense_attention"), "total"]
    assert "Prefill of 262,144 tokens, by token" in text


def test_the_json_has_the_fields_that_are_documented() -> None:
    plan = winnow("plan", "minimax-m3.1-flash", *PUBLISHED, "--json").json
    page = (Path(__file__).parents[1] / "docs" / "planning.md").read_text(encoding="utf-8")
    described = page.split("## JSON\n")[1].split("\n## ")[0]
    floor = plan["roofline"]["decode"][0]
    for part in (plan, plan["settings"], plan["fit"], floor, floor["parts"]["experts"]):
        for field in part:
            assert f"`{field}`" in described, field
    assert plan["version"] == 1
    assert set(floor["parts"]) == set(STEP_PARTS)


def test_a_comparison_says_what_differs_before_its_numbers() -> None:
    words = ("minimax-m3.1-flash", *PUBLISHED, "--compare", "minimax-m3:kv=fp8,index=fp8")
    text = winnow("plan", *words).out
    headings = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert headings == [
        "Differs", "Same", "Assumed for all", "Assumed for 1: minimax-m3.1-flash",
        "Assumed for 2: minimax-m3", "Numbers",
    ]  # fmt: skip
    same = text.split("\nSame\n")[1].split("\n\n")[0]
    assert ["linear", "mxfp8"] in [line.split() for line in same.splitlines()]
    assert "experts" not in same
    table = {line[:34].strip(): line[34:].split() for line in text.splitlines()}
    assert table["sequences in all"] == ["76", "28"]
    assert table["checkpoint, GB"] == ["250.1", "451.5"]
    both = winnow("plan", *words, "--json").json
    assert list(both) == ["version", "differences", "plans"]
    assert both["differences"]["kv"] == ["nvfp4", "fp8"]
    alone = winnow("plan", *words[:-2], "--json").json
    assert both["plans"][0] == {key: alone[key] for key in alone if key != "version"}


def test_a_preset_beside_itself_may_have_options_of_its_own() -> None:
    beside = "minimax-m3.1-flash:parallel=tp4dcp4,gpus=8,context=4096,experts=mxfp8,draft=2"
    words = ("minimax-m3.1-flash", *PUBLISHED, "--compare", beside, "minimax-m3:gpu=own=200,")
    first, second, third = winnow("plan", *words, "--json").json["plans"]
    assert second["settings"]["parallel"] == "tp4dcp4"
    changed = {k for k, v in second["settings"].items() if v != first["settings"][k]}
    assert changed == {"parallel", "gpus", "replicas", "context", "experts", "draft"}
    assert third["settings"]["memory_bytes"] == 200 * 10**9
    assert third["roofline"] is None


def test_a_plan_in_which_no_sequence_fits_says_how_long_one_may_be(tmp_path: Path) -> None:
    build(tmp_path, "hub")
    config = json.loads((tmp_path / "config.json").read_text())
    config["max_position_embeddings"] = 10**7
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = (tmp_path, "--gpu", "h100=0.01", "--context", "9999999")
    plan = winnow("plan", *words, "--json").json
    assert plan["fit"]["sequences"] == 0
    text = winnow("plan", *words).out
    assert f"the longest sequence that fits has {plan['fit']['num_tokens']:,} tokens" in text
    assert "Decode step at" not in text
