"""Steps of a GPU beside their floors, as far as a machine without one can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from winnow.bench.device_step import DeviceSteps
from winnow.bench.floors import Rates, floors_us, step_table, storage_formats
from winnow.bench.parts import WHOLE
from winnow.bench.step import DECODE, Shape, Steps
from winnow.bench.timing import BETWEEN, HEAD, PARTS
from winnow.config import EngineConfig
from winnow.engine.build import build_engine
from winnow.engine.engine import Engine
from winnow.errors import CapacityError
from winnow.spec.cost import STEP_PARTS, StepShape, step_costs
from winnow.spec.parallel import ParallelPlan

RATES = Rates(read=1e12, products=1e15)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Engine:
    config = EngineConfig(num_pages=64, prefix_caching=False, kv_format="nvfp4", index_format="fp8")
    return build_engine(str(tiny), config, progress=False)


def test_floors_are_the_costs_over_what_the_gpu_was_seen_to_do(engine: Engine) -> None:
    shape = StepShape(sequences=4, rows=1, kv_len=900, logit_rows=4)
    costs = step_costs(engine.spec, storage_formats(engine), ParallelPlan(), shape)
    for part, floor in floors_us(engine, shape, RATES).items():
        cost = costs[part]
        assert floor == pytest.approx(max(cost.num_bytes / 1e6, cost.num_flops / 1e9))


def test_a_table_has_every_part_once_and_its_floors_add_up_to_the_wholes(engine: Engine) -> None:
    parts = {*PARTS.values(), HEAD, BETWEEN}
    seconds = {**dict.fromkeys(parts, 1e-4), WHOLE: len(parts) * 1e-4}
    shape = Shape(4, 900)
    measured = [
        Steps(DECODE, shape, 4, [seconds], "device events"),
        Steps(DECODE, shape, 4, [{WHOLE: 8e-4}], "CUDA graph replay"),
    ]
    lines = step_table(engine, measured, RATES).splitlines()
    words = [line.strip() for line in lines]
    for part in parts:
        assert sum(word.startswith(part) for word in words) == 1, part
    floors = floors_us(engine, StepShape(4, 1, 900, 4), RATES)
    columns = [line.split() for line in lines if line.startswith("  whole  ")]
    assert [float(word) for word in columns[0][1:3]] == pytest.approx(
        [800.0, sum(floors.values())], abs=0.06
    )
    # Parts of one floor are shown with their sum.
    assert any(word.split()[:2] == ["projections", "200.0"] for word in words)
    assert set(floors) == set(STEP_PARTS)


def test_a_measured_step_has_pages_of_its_own_for_each_request(engine: Engine) -> None:
    steps = DeviceSteps(engine)
    plan, requests = steps.plan(3, 300, 1)
    pages = [page for row in plan.rows for page in row.pages]
    assert len(set(pages)) == len(pages) == 9
    assert 0 not in pages
    assert {row.start for row in plan.rows} == {299}
    assert len({request.prompt for request in requests.values()}) == 3
    with pytest.raises(CapacityError, match=r"22 x 300 tokens take 66 pages, the cache has 63"):
        steps.plan(22, 300, 1)
