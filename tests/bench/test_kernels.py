"""`winnow bench kernels`: checks come before times, and a machine without a GPU says so."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from winnow.bench import kernels as module
from winnow.bench.kernel_peers import Peers
from winnow.bench.kernel_state import sampled, selections
from winnow.bench.kernel_work import model, works
from winnow.bench.kernels import Peak, measure, render
from winnow.bench.record import load
from winnow.commands.bench_kernels import add_kernels
from winnow.errors import RequestError, UnsupportedError
from winnow.ops import table
from winnow.ops.linear.reference import linear


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_kernels(parser.add_subparsers())
    args = parser.parse_args(["kernels", *words])
    code: int = args.run(args)
    return code


def test_small_cases_on_a_cpu_have_a_time_and_a_record(tmp_path: Path) -> None:
    out = tmp_path / "kernels.jsonl"
    words = ("--backend", "cpu", "--op", "linear", "--only", "mxfp8 9x384", "--out", str(out))
    assert run(*words) == 0
    (record,) = load(out)
    assert record.level == "kernel"
    assert record.workload["op"] == "linear"
    assert record.conditions["backend"] == "cpu"


def test_a_case_that_fails_its_check_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def wrong(x: Tensor, weight: Any) -> Tensor:
        calls.append(x.shape)
        return linear(x, weight) + 1

    honest = table.kernels

    def one_wrong(backend: str) -> table.Kernels:
        found = honest(backend)
        return found if backend == "reference" else table.replace(found, linear=wrong)

    monkeypatch.setattr(module, "kernels", one_wrong)
    peak, lines = measure("cpu", ["linear"], "mxfp8 9x384")
    (line,) = lines
    assert peak is None
    assert line.us is None
    assert line.record is None
    assert "FAILED" in render(line, peak)
    assert len(calls) == 1


def test_json_is_one_line_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--backend", "cpu", "--op", "linear", "--only", "mxfp8 9x", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines
    assert all(line["op"] == "linear" and line["us"] > 0 for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_workloads_are_refused_and_the_way_out_is_named() -> None:
    with pytest.raises(UnsupportedError, match="--backend cpu times small cases"):
        run()


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(RequestError, match="'matmul'"):
        measure("cpu", ["matmul"])


def test_workloads_have_names_of_their_own_and_ops_of_the_table() -> None:
    found = list(works())
    assert len({(work.op, work.name) for work in found}) == len(found)
    assert {work.op for work in found} <= set(module.KERNEL_OPS)


def test_a_goal_of_so_many_floors_follows_the_bandwidth_that_was_measured() -> None:
    (work,) = (work for work in works() if work.goal_floors is not None)
    assert work.goal(4_000_000, read_tb_s=4.0) == pytest.approx(1.3)
    assert work.goal(4_000_000, read_tb_s=2.0) == pytest.approx(2.6)
    assert all(one.goal(1, 4.0) == one.goal_us for one in works() if one.name != work.name)


def test_a_line_shows_its_share_of_both_peaks() -> None:
    sizes = {"num_bytes": 22_000_000, "num_flops": 1_000_000_000, "goal_us": 22.0}
    line = module.Line(
        op="linear",
        name="x",
        served_by="m",
        check="error 1e-3",
        samples=(10.0,),
        peers={"other": 36.0},
        record=None,
        **sizes,  # type: ignore[arg-type]
    )
    shown = render(line, Peak(read_tb_s=4.4, bf16_tflop_s=800.0))
    assert "50%" in shown
    assert "12%" in shown
    assert "other 36.0" in shown


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("context", [0, 300, 9000])
def test_made_selections_are_such_as_the_indexer_gives(context: int, clustered: bool) -> None:
    positions = context + torch.arange(200)
    ids = selections(positions, 4, 16, clustered)
    for row, position in enumerate(positions.tolist()):
        for head in range(4):
            own = [i for i in ids[row, head].tolist() if i >= 0]
            current = position // 128
            assert own == sorted(set(own))
            assert own[-1] == current
            assert len(own) == min(16, current + 1)
            assert ids[row, head, len(own) :].eq(-1).all()


def test_sampled_rows_are_rows() -> None:
    assert sampled(1) == (0,)
    assert sampled(2) == (0, 1)
    assert sampled(8192) == (0, 2730, 5461, 8191)


def test_a_folder_without_peers_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="benchmarks/peers/fetch"):
        Peers(model(), tmp_path)
