"""Engine steps by part: the parts add up, and each is where it belongs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.records import record

from winnow.bench.parts import breakdown
from winnow.bench.step import DECODE, PREFILL, Shape, Steps, run, step_records
from winnow.bench.timing import PARTS, REST
from winnow.config import EngineConfig
from winnow.engine.build import build_engine
from winnow.engine.engine import Engine
from winnow.errors import UnsupportedError

CHUNK = 64


def engine(tiny: Path, **options: object) -> Engine:
    config = EngineConfig.from_options({"max_step_tokens": CHUNK, "num_pages": 64, **options})
    return build_engine(str(tiny), config, progress=False)


@pytest.fixture(scope="module")
def measured(tiny: Path) -> tuple[Engine, list[Steps]]:
    built = engine(tiny, prefix_caching=False)
    # Steps of a few rows on two threads are mostly the threads' waiting for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = list(run(built, [Shape(1, 100), Shape(3, 140)], steps=2, repeats=2))
    torch.set_num_threads(threads)
    return built, found


def test_parts_of_every_step_add_up_to_it(measured: tuple[Engine, list[Steps]]) -> None:
    for found in measured[1]:
        for seconds in found.seconds:
            whole = seconds["whole"]
            parts = sum(spent for part, spent in seconds.items() if part != "whole")
            assert parts == pytest.approx(whole, rel=1e-9)
            assert min(seconds.values()) >= 0
            assert seconds[REST] < whole


def test_every_op_of_the_model_has_its_part(measured: tuple[Engine, list[Steps]]) -> None:
    decode = next(found for found in measured[1] if found.what == DECODE)
    assert set(decode.seconds[0]) >= {*PARTS.values(), "head", "inputs", "scheduling"}


def test_decode_steps_have_the_whole_batch_and_prefill_chunks_are_full(
    measured: tuple[Engine, list[Steps]],
) -> None:
    seen = [(s.what, s.shape, s.rows, len(s.seconds)) for s in measured[1]]
    assert seen == [
        (DECODE, Shape(1, 100), 1, 4),
        (DECODE, Shape(3, 140), 3, 4),
        (PREFILL, Shape(1, 100), CHUNK, 2),
        (PREFILL, Shape(1, 140), CHUNK, 2),
    ]


def test_measuring_leaves_no_request_behind(measured: tuple[Engine, list[Steps]]) -> None:
    assert not measured[0].has_work
    assert measured[0].scheduler.stats().pages_used == 0


def test_step_records_carry_formats_and_one_run(measured: tuple[Engine, list[Steps]]) -> None:
    built, (found, *_) = measured
    records = step_records(built, "tiny", found, "r1", {"weights": "of the checkpoint"})
    assert {r.run for r in records} == {"r1"}
    assert records[0].workload["part"] == "whole"
    assert records[0].conditions["formats"]["kv"] == built.runner.storage.layout.kv_format.name
    assert records[0].conditions["formats"]["experts"] == "float32"
    whole, parts = breakdown(records)
    assert sum(parts.values()) == pytest.approx(whole)


def test_a_breakdown_leaves_out_steps_that_the_system_interrupted() -> None:
    def part(name: str, *samples: float) -> object:
        workload = {"part": name}
        return record("decode step", samples, level="step", workload=workload, run="r")

    records = [
        part("whole", 10.0, 10.0, 90.0, 12.0),
        part("experts", 6.0, 7.0, 6.0, 7.0),
        part("rest", 4.0, 3.0, 84.0, 5.0),
    ]
    assert breakdown(records) == (11.0, {"experts": 7.0, "rest": 4.0})  # type: ignore[arg-type]


def test_prompts_found_in_the_cache_are_not_measured_as_computed(tiny: Path) -> None:
    with pytest.raises(UnsupportedError, match="--no-prefix-caching"):
        next(run(engine(tiny), [Shape(1, 100)], steps=1, repeats=1))
