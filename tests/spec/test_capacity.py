"""Plans: the published figures with their assumptions, and what goes together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from winnow.errors import CapacityError, CheckpointError, UnsupportedError
from winnow.spec.capacity import BATCHES, CONTEXTS, Question, differences, plan

M3 = Question("minimax-m3", kv="fp8", index="fp8")
FLASH = Question("minimax-m3.1-flash", kv="nvfp4", index="nvfp4")


def on_four_b300(question: Question, *, reserve_gb: float, charge: bool, gpu: str = "b300") -> int:
    """Sequences of 262,144 tokens on four GPUs, attention replicated, experts divided."""
    answer = plan(
        replace(
            question,
            gpu=gpu,
            parallel="dep4",
            context=262_144,
            reserve_bytes=int(reserve_gb * 10**9),
            charge_index=charge,
        )
    )
    assert answer.fit is not None
    assert answer.fit.sequences == 4 * answer.fit.sequences_per_group
    charged = any("index cache NOT charged" in sentence for sentence in answer.assumptions)
    assert charged != charge
    return answer.fit.sequences


@pytest.mark.parametrize("gpu", ["b300", "b300=288"])
@pytest.mark.parametrize("reserve_gb", [8.3, 9, 12.8])
def test_28_and_76_sequences_fit_when_the_index_is_not_charged(gpu: str, reserve_gb: float) -> None:
    assert on_four_b300(M3, reserve_gb=reserve_gb, charge=False, gpu=gpu) == 28
    assert on_four_b300(FLASH, reserve_gb=reserve_gb, charge=False, gpu=gpu) == 76


def test_without_a_reserve_more_would_fit_than_is_published() -> None:
    assert on_four_b300(M3, reserve_gb=0, charge=False) == 32
    assert on_four_b300(FLASH, reserve_gb=0, charge=False) == 80


@pytest.mark.parametrize(("reserve_gb", "fp8", "nvfp4"), [(0, 64, 72), (1, 64, 72), (9, 60, 68)])
def test_charging_the_index_takes_some_of_the_76(reserve_gb: float, fp8: int, nvfp4: int) -> None:
    assert on_four_b300(M3, reserve_gb=reserve_gb, charge=True) == 28
    eight_bit_index = replace(FLASH, index="fp8")
    assert on_four_b300(eight_bit_index, reserve_gb=reserve_gb, charge=True) == fp8
    assert on_four_b300(FLASH, reserve_gb=reserve_gb, charge=True) == nvfp4


def test_tokens_and_rows_are_the_published_ones() -> None:
    eight_bit = plan(replace(FLASH, kv="fp8", index="fp8"))
    assert eight_bit.token_bytes == {"kv": 61_440, "index": 7_680, "draft": 0}
    assert plan(FLASH).token_bytes == {"kv": 34_560, "index": 4_320, "draft": 0}
    row = plan(replace(FLASH, parallel="tp4", draft=5))
    assert (row.row_bytes, row.row_pieces) == (1_822_720, 125)
    assert row.row_parts == {"index": 552_960, "kv": 1_105_920, "draft": 163_840}


def test_checkpoints_are_the_published_ones() -> None:
    assert round(plan(M3).checkpoint_bytes / 1e9, 1) == 451.5
    assert round(plan(FLASH).checkpoint_bytes / 1e9, 1) == 250.1


def test_memory_holds_weights_reserve_and_pages_to_less_than_a_page() -> None:
    answer = plan(replace(FLASH, gpu="own=300", memory_fraction=0.95, reserve_bytes=10**9))
    fit = answer.fit
    assert fit is not None
    assert fit.usable_bytes == 285 * 10**9
    left = fit.usable_bytes - answer.weight_bytes - 10**9 - fit.num_pages * answer.row_bytes
    assert 0 <= left < answer.row_bytes
    assert fit.num_tokens == (fit.num_pages - 1) * 128
    assert fit.sequences == fit.num_tokens // 131_072


def test_a_gpu_of_unknown_peaks_has_a_capacity_and_no_roofline() -> None:
    answer = plan(replace(FLASH, gpu="own=300"))
    assert answer.fit is not None
    assert answer.roofline is None
    assert "the peaks of own are not known: no roofline" in answer.assumptions
    nowhere = plan(FLASH)
    assert nowhere.fit is nowhere.roofline is None
    assert any("no GPU was named" in sentence for sentence in nowhere.assumptions)


def test_replicas_hold_their_own_sequences_and_leave_a_replica_as_it_is() -> None:
    one = plan(replace(FLASH, gpu="h200", parallel="tp4"))
    two = plan(replace(FLASH, gpu="h200", parallel="tp4", gpus=8))
    assert one.fit is not None
    assert two.fit is not None
    assert (one.settings["replicas"], two.settings["replicas"]) == (1, 2)
    assert two.fit.sequences == 2 * one.fit.sequences > 0
    assert two.roofline == one.roofline
    assert plan(replace(FLASH, gpus=8)).settings["parallel"] == "tp8"


def test_a_floor_says_whether_its_requests_fit() -> None:
    answer = plan(replace(FLASH, gpu="b300", parallel="dep4", context=262_144))
    assert answer.fit is not None
    assert answer.roofline is not None
    contexts = {floor.context for floor in answer.roofline.decode}
    assert contexts == {*CONTEXTS, 262_144} == {f.context for f in answer.roofline.prefill}
    full = answer.fit.sequences
    assert {floor.batch for floor in answer.roofline.decode} == {*BATCHES, full}
    for floor in answer.roofline.decode:
        if floor.context == 262_144:
            assert floor.fits == (floor.batch <= full)


def test_formats_asked_for_replace_the_checkpoints_own() -> None:
    own, asked = plan(M3), plan(replace(M3, experts="nvfp4", linear="plain"))
    assert (own.settings["experts"], own.settings["linear"]) == ("mxfp8", "mxfp8")
    assert (asked.settings["experts"], asked.settings["linear"]) == ("nvfp4", "bf16")
    assert asked.weights["experts"] == plan(FLASH).weights["experts"]
    assert asked.weights["attention"] == own.weights["attention"] * 64 // 33


def test_plans_differ_in_what_was_asked_differently_and_in_nothing_else() -> None:
    plans = [plan(replace(question, gpu="b300", parallel="dep4")) for question in (FLASH, M3)]
    assert differences(plans) == {
        "model": ["minimax-m3.1-flash", "minimax-m3"],
        "kv": ["nvfp4", "fp8"],
        "index": ["nvfp4", "fp8"],
        "experts": ["nvfp4", "mxfp8"],
    }
    assert differences(plans[:1] * 2) == {}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "m4"}, UnsupportedError, r"'m4' is neither a preset \(minimax-m3, "),
        ({"gpu": "b100"}, UnsupportedError, r"no GPU 'b100': use one of"),
        ({"gpu": "h100"}, CapacityError, r"needs 248\.7.* GB \(248\.7.* more ranks"),
        ({"gpu": "own=1"}, CapacityError, r"0\.900 GB are usable \(90% of 1\.000 GB\)"),
        ({"gpu": "b300", "reserve_bytes": 10**11}, CapacityError, r"100\.000 GB of reserve"),
        ({"parallel": "tp4", "gpus": 6}, UnsupportedError, r"6 GPUs do not .* use 4 GPUs or"),
        ({"parallel": "tp4", "gpus": 2}, UnsupportedError, r"2 GPUs do not .* use 4 GPUs or"),
        ({"gpus": 3}, UnsupportedError, r"64 heads do not divide among 3 ranks"),
        ({"context": 10**6}, UnsupportedError, r"1000000 tokens .* 524288 positions: lower"),
    ],
)
def test_an_impossible_plan_is_one_sentence_with_numbers(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        plan(replace(FLASH, **changes))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", r"config\.json is no JSON"), ("[]", r"holds no JSON object")]
)
def test_a_damaged_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        plan(Question(str(tmp_path)))
