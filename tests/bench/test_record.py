"""Records: what is refused, what comes back from a file, and what is committed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.records import CONDITIONS, record

from winnow.bench.record import Record, append, load
from winnow.errors import RequestError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_record_without_one_of_its_conditions_is_refused_by_its_name(name: str) -> None:
    conditions = {k: v for k, v in CONDITIONS.items() if k != name}
    with pytest.raises(RequestError, match=f"without its {name} says nothing"):
        Record(
            level="serving",
            what="x",
            unit="ms",
            samples=(1.0,),
            workload={"name": "chat"},
            conditions=conditions,
            machine={"name": "m"},
            software={"server": "s"},
            commit="c",
        )


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("formats", {}, "name each format"),
        ("formats", {"kv": 4}, "name each format"),
        ("parallel", {"plan": "tp4"}, "its devices"),
        ("parallel", {"plan": "tp4", "devices": 0}, "its devices"),
        ("acceptance", "none", '"kind": "none"'),
        ("acceptance", {"kind": "synthetic"}, "its rates"),
        ("acceptance", {"kind": "synthetic", "rates": []}, "its rates"),
        ("acceptance", {"kind": "synthetic", "rates": [0.9, 1.1]}, "its rates"),
        ("acceptance", {"kind": "synthetic", "mean_length": 0.9}, "at least 1"),
        ("cache_state", "", "in words"),
        ("concurrency", 0, "whole number"),
        ("concurrency", True, "whole number"),
        ("concurrency", None, "whole number"),
        ("latency_objective", None, "no objective"),
        ("latency_objective", {"ttft_ms": 0}, "no objective"),
    ],
)
def test_a_condition_that_says_nothing_is_refused_with_what_it_takes(
    name: str, value: Any, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        record(conditions={name: value})
    assert name in str(refused.value)


def test_null_stands_only_for_what_a_level_does_not_have() -> None:
    nothing = dict.fromkeys(("acceptance", "concurrency", "latency_objective"))
    record(level="kernel", conditions=nothing)
    with pytest.raises(RequestError, match="acceptance of a step record"):
        record(level="step", conditions=nothing)
    with pytest.raises(RequestError, match="cache_state of a kernel record"):
        record(level="kernel", conditions={"cache_state": None})


def test_an_open_loop_has_a_rate_instead_of_a_concurrency() -> None:
    record(conditions={"concurrency": None, "request_rate": 4.0})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"level": "system"}, "use one of capacity, kernel"),
        ({"samples": ()}, "without samples"),
        ({"samples": (math.nan,)}, "finite"),
        ({"samples": ("1",)}, "numbers"),
        ({"workload": {}}, "without workload"),
        ({"commit": ""}, "without commit"),
    ],
)
def test_a_record_that_says_nothing_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        record(**changes)


def test_what_was_written_comes_back_with_the_line_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    written = [record(run="a"), record("request latency", (1.0, 3.0, 2.0))]
    append(path, written[:1])
    append(path, written[1:])
    found = load(path)
    assert found == written
    assert [r.where for r in found] == [f"{path}:1", f"{path}:2"]
    assert found[1].median == 2.0
    assert "where" not in path.read_text()


def test_a_percentile_is_a_sample_that_was_seen() -> None:
    found = record(samples=tuple(float(n) for n in range(1, 11)))
    assert [found.percentile(p) for p in (0, 10, 50, 90, 99, 100)] == [1, 1, 5, 9, 10, 10]


def test_reading_and_combining_records_needs_neither_torch_nor_matplotlib() -> None:
    names = (
        "aiperf agent_trace capacity combine conditions exports frontier machine parts prices "
        "record runs serving workloads"
    )
    modules = [f"winnow.bench.{name}" for name in names.split()]
    modules += ["winnow.commands.bench", "winnow.commands.report"]
    script = (
        f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def good_line() -> dict[str, Any]:
    return {
        "level": "serving",
        "what": "x",
        "unit": "ms",
        "samples": [1.0],
        "workload": {"name": "chat"},
        "conditions": CONDITIONS,
        "machine": {"name": "m"},
        "software": {"server": "s"},
        "commit": "c",
    }


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"level": "serving",', "not a line of JSON"),
        ("[1, 2]", "a record is a JSON object, this is a list"),
        (json.dumps({**good_line(), "speed": 3}), "no field 'speed'"),
        (json.dumps({**good_line(), "samples": 3}), "field samples of a record is 3"),
        (json.dumps({**good_line(), "conditions": {}}), "without its formats, parallel"),
        (json.dumps({k: v for k, v in good_line().items() if k != "machine"}), "without machine"),
    ],
)
def test_a_bad_line_is_one_sentence_with_its_file_and_number(
    line: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(f"{json.dumps(good_line())}\n\n{line}\n")
    with pytest.raises(RequestError, match=says) as refused:
        load(path)
    assert str(refused.value).startswith(f"{path}:3: ")
    assert "\n" not in str(refused.value)


def test_a_file_without_records_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RequestError, match="holds no records"):
        load(tmp_path / "empty.jsonl")
    with pytest.raises(RequestError, match="cannot be read"):
        load(tmp_path / "none.jsonl")


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.jsonl")), ids=lambda p: p.name)
def test_committed_records_load_and_their_medians_are_those_of_their_samples(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for found, line in zip(load(path), lines, strict=True):
        assert found.median == line["median"]
