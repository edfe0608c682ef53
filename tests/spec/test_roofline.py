"""Floors: by hand, additive, monotonic, and named after what binds."""

from __future__ import annotations

import pytest

from winnow.spec.cost import STEP_PARTS, PartCost, StepShape, Storage
from winnow.spec.formats import BF16, FP8, MXFP8, NVFP4
from winnow.spec.hardware import Peaks, find_gpu
from winnow.spec.parallel import ParallelPlan
from winnow.spec.presets import preset
from winnow.spec.roofline import PREFILL_CHUNK, Machine

FLASH = preset("minimax-m3.1-flash")
FOUR_BIT = Storage(experts=NVFP4, linear=MXFP8, plain=BF16, kv=NVFP4, index=NVFP4)
ROUND = Peaks(1e12, 1e11, 1e15, 2e15, 4e15, (FP8, MXFP8, NVFP4))


def machine(word: str = "tp1", gpu: str = "h200") -> Machine:
    peaks = find_gpu(gpu).peaks
    assert peaks is not None
    return Machine(FLASH, FOUR_BIT, ParallelPlan.parse(word), peaks)


def test_a_part_waits_for_the_slowest_of_memory_products_and_link() -> None:
    part = Machine(FLASH, FOUR_BIT, ParallelPlan(), ROUND).part_floor
    for cost, floor_us, limit in (
        (PartCost(3e6, 1e9, 1e5), 3.0, "memory"),
        (PartCost(1e6, 8e9, 1e5), 2.0, "compute"),
        (PartCost(1e6, 1e9, 7e5), 7.0, "link"),
    ):
        floor = part("experts", cost)
        assert (floor.floor_us, floor.limit) == (pytest.approx(floor_us), limit)
    # The same operations in the widths of the other parts.
    assert part("projections", PartCost(num_flops=8e9)).floor_us == pytest.approx(4.0)
    assert part("sparse_attention", PartCost(num_flops=8e9)).floor_us == pytest.approx(4.0)
    assert part("router", PartCost(num_flops=8e9)).floor_us == pytest.approx(8.0)


def test_the_index_scan_of_32_long_requests_takes_63_us_a_layer_on_an_h200() -> None:
    """302 MB over 4.8 TB/s, 60 layers of it."""
    scan = machine().decode(131_072, 32).parts["index_scan"]
    assert scan.floor_us / 60 == pytest.approx(62.9, abs=0.05)
    assert scan.limit == "memory"


def test_a_step_takes_the_sum_of_its_parts_and_is_named_after_the_longest() -> None:
    for batch in (1, 32, 512):
        floor = machine("tp4").decode(131_072, batch)
        assert tuple(floor.parts) == STEP_PARTS
        assert floor.floor_us == pytest.approx(sum(p.floor_us for p in floor.parts.values()))
        assert floor.parts[floor.binds].floor_us == max(p.floor_us for p in floor.parts.values())


@pytest.mark.parametrize("word", ["tp1", "tp8", "dep8", "tp8dcp8"])
def test_no_part_gets_cheaper_with_more_context_or_more_requests(word: str) -> None:
    shapes = [(context, batch) for context in (1000, 4096, 524_288) for batch in (8, 64, 512)]
    floors = {shape: machine(word).decode(*shape) for shape in shapes}
    for context, batch in shapes:
        for other in shapes:
            if other[0] >= context and other[1] >= batch:
                for part in STEP_PARTS:
                    less, more = floors[context, batch].parts[part], floors[other].parts[part]
                    assert less.floor_us <= more.floor_us * (1 + 1e-12), (part, other)


def test_long_contexts_are_bound_by_the_index_scan_and_scanning_by_blocks_relieves_it() -> None:
    by_heads = machine("tp4").decode(524_288, 64)
    by_blocks = machine("tp4dcp4").decode(524_288, 64)
    assert by_heads.binds == "index_scan"
    scans = [floor.parts["index_scan"].floor_us for floor in (by_heads, by_blocks)]
    assert scans[0] == pytest.approx(4 * scans[1])
    assert by_blocks.floor_us < by_heads.floor_us


def test_prefill_adds_up_its_chunks_and_asks_for_logits_once() -> None:
    prompt = 2 * PREFILL_CHUNK + 100
    whole = machine().prefill(prompt)
    ends = [
        (PREFILL_CHUNK, PREFILL_CHUNK, 0),
        (PREFILL_CHUNK, 2 * PREFILL_CHUNK, 0),
        (100, prompt, 1),
    ]
    steps = [machine().step(StepShape(1, rows, kv_len, logits)) for rows, kv_len, logits in ends]
    for part in STEP_PARTS:
        assert whole.parts[part].floor_us == pytest.approx(sum(s[part].floor_us for s in steps))
        assert whole.parts[part].num_bytes == pytest.approx(sum(s[part].num_bytes for s in steps))
    assert whole.parts["head"].num_flops == 2 * 200_064 * 6144
    assert whole.parts["head"].num_bytes == 2 * (200_064 + prompt) * 6144
    assert whole.floor_us == pytest.approx(sum(p.floor_us for p in whole.parts.values()))


def test_groups_prefill_a_prompt_each() -> None:
    floor = machine("dep4").prefill(4096)
    assert floor.batch == 4
    alone = machine("tp1").prefill(4096)
    assert floor.parts["index_scan"] == alone.parts["index_scan"]
    # Four times the rows over a quarter of the experts.
    assert floor.parts["experts"].num_flops == alone.parts["experts"].num_flops
