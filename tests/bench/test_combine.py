"""What may become one number or one curve, and what may not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.records import SYNTHETIC, load_point, record

from winnow.bench.combine import circumstances, condition_sets, differences, pooled_median
from winnow.bench.frontier import Point, pareto, sweep
from winnow.bench.prices import Price, load_prices, price_of
from winnow.errors import RequestError


def test_one_number_comes_of_records_under_the_same_conditions() -> None:
    same = [record(samples=(1.0, 5.0)), record(samples=(3.0,)), record("other", (9.0,))]
    assert pooled_median(same, "time to first token") == (3.0, "ms")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"level": "step"}, "a serving and a step record"),
        ({"conditions": SYNTHETIC}, "acceptance.kind is 'natural' and 'synthetic'"),
        ({"conditions": {"concurrency": 16}}, "concurrency is 8 and 16"),
        ({"machine": {"name": "another"}}, "machine"),
        ({"commit": "fedcba987654"}, "commit"),
        ({"workload": {"name": "chat", "phase": "warm-up"}}, "workload.phase"),
        ({"unit": "s"}, "units ms, s"),
    ],
)
def test_one_number_across_levels_or_conditions_is_an_error_that_names_the_difference(
    changes: dict[str, Any], says: str
) -> None:
    two = [record(where="a.jsonl:1"), replace(record(**changes), where="b.jsonl:7")]
    with pytest.raises(RequestError, match=says) as refused:
        pooled_median(two, "time to first token")
    if "unit" not in changes:
        assert "a.jsonl:1 and b.jsonl:7" in str(refused.value)


def test_a_number_of_nothing_names_what_there_is() -> None:
    with pytest.raises(RequestError, match="there are: time to first token"):
        pooled_median([record()], "goodput")


def test_circumstances_leave_out_a_name_and_all_below_it_but_not_names_that_begin_alike() -> None:
    own = circumstances(record(conditions={"parallel_notes": "x"}), ["parallel"])
    assert not [name for name in own if name.startswith("parallel.")]
    assert own["parallel_notes"] == "x"


def test_differences_name_what_only_one_side_has() -> None:
    found = differences({"a": 1, "b": 2}, {"b": 3, "c": 4})
    assert [(d.name, d.left, d.right) for d in found] == [
        ("a", 1, None),
        ("b", 2, 3),
        ("c", None, 4),
    ]


def test_a_sweep_over_concurrency_and_plans_is_one_frontier() -> None:
    other = {"parallel": {"plan": "dep4", "devices": 4}}
    records = [
        *load_point(1, 100.0, 500.0),
        *load_point(8, 60.0, 3000.0),
        *load_point(8, 50.0, 2900.0, conditions=other),
        record("time to first token", (210.0, 200.0), run="run-1-100.0"),
    ]
    found = sweep(records[:6])
    assert [(p.speed, p.throughput) for p in found] == [(50, 2900), (60, 3000), (100, 500)]
    assert [p.load for p in found] == ["8 at once, dep4", "8 at once, tp4", "1 at once, tp4"]
    assert [p.speed for p in pareto(found)] == [60, 100]
    assert len(condition_sets(records)) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"conditions": SYNTHETIC}, "acceptance.kind"),
        ({"conditions": {"formats": {"kv": "fp8", "index": "fp8"}}}, "formats.index"),
        ({"machine": {"gpus": ["NVIDIA B300"] * 4}}, "machine.gpus"),
    ],
)
def test_points_of_two_condition_sets_make_no_frontier(changes: dict[str, Any], says: str) -> None:
    records = [*load_point(1, 419.0, 9000.0), *load_point(64, 127.0, 153_800.0, **changes)]
    with pytest.raises(RequestError, match=says):
        sweep(records)
    assert len(condition_sets(records)) == 2


def test_kernel_records_make_no_frontier() -> None:
    with pytest.raises(RequestError, match="made of serving records, not of kernel"):
        sweep([record(level="kernel", run="a")])


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=20))
def test_a_frontier_holds_exactly_the_points_that_nothing_beats(axes: list[Any]) -> None:
    points = [Point(str(i), x, y, "", None) for i, (x, y) in enumerate(axes)]
    best = {(p.speed, p.throughput) for p in pareto(points)}
    beaten = {
        (p.speed, p.throughput)
        for p in points
        if any(
            q.speed >= p.speed
            and q.throughput >= p.throughput
            and (q.speed, q.throughput) != (p.speed, p.throughput)
            for q in points
        )
    }
    assert best == {(p.speed, p.throughput) for p in points} - beaten


def test_tokens_for_money_count_the_hour_and_its_energy(tmp_path: Any) -> None:
    path = tmp_path / "p.toml"
    path.write_text(
        'currency = "EUR"\n[[price]]\nmachine = "H200"\ndevice_hour = 3.0\nwatts = 1000\n'
        "per_kwh = 0.6\n"
    )
    (price,) = load_prices(path)
    assert price.hour == pytest.approx(3.6)
    assert price.tokens_per_unit(1000.0) == pytest.approx(1e6)
    assert price_of([price], {"gpus": ["NVIDIA H200"]}) == price
    assert price_of([price], {"gpus": ["NVIDIA B300"]}) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("currency = ", "is not TOML"),
        ('currency = "EUR"', "at least one"),
        ('currency = "EUR"\n[[price]]\nmachine = "a"', "machine and device_hour always"),
        ('currency = "EUR"\n[[price]]\nmachine = "a"\nhour = 2', "takes machine, device_hour"),
        ('currency = "EUR"\n[[price]]\nmachine = "a"\ndevice_hour = 0', "a number above 0"),
        ('currency = "EUR"\n[[price]]\nmachine = "a"\ndevice_hour = 1\nwatts = -1', "at least 0"),
    ],
)
def test_a_price_table_that_is_wrong_is_one_sentence(text: str, says: str, tmp_path: Any) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(RequestError, match=says):
        load_prices(path)


def test_two_prices_for_one_machine_are_an_error() -> None:
    prices = [Price("H200", "EUR", 3.0), Price("NVIDIA", "EUR", 4.0)]
    with pytest.raises(RequestError, match="both fit"):
        price_of(prices, {"gpu": "NVIDIA H200"})
