"""Every case of every op on the CPU backend, and that the suite notices a wrong kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from winnow.bench import conformance
from winnow.ops.case import Case, error, judge
from winnow.ops.sparse_attention import reference
from winnow.ops.table import ByCase, kernels

CPU = kernels("cpu")
CASES = [
    (folder, case)
    for folder in ("codec", *conformance.KERNEL_OPS)
    for case in conformance.cases(folder)
]
MANY_ROWS = "many rows wide kv nvfp4 bf16 top-16"
"""Of the cases of many rows, which are for kernels that change with the number of rows."""
RUN = [(op, case) for op, case in CASES if "many rows" not in case.name or case.name == MANY_ROWS]


def served(folder: str, op: str) -> Callable[..., Any]:
    return conformance._codec("cpu", op) if folder == "codec" else conformance._kernel(CPU, op)


@pytest.mark.parametrize(
    ("folder", "case"), RUN, ids=[f"{case.op}: {case.name}" for _, case in RUN]
)
def test_the_cpu_backend_agrees_with_the_reference(folder: str, case: Case) -> None:
    reference = conformance._reference(folder, case.op)
    for verdict in judge(case, served(folder, case.op), reference):
        assert verdict.passed, f"{verdict.output}: error {verdict.error:.3e}"


def test_names_of_cases_are_distinct() -> None:
    names = [(case.op, case.name) for _, case in CASES]
    assert len(set(names)) == len(names)
    assert ("sparse_attention", MANY_ROWS) in names


def only(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[str], tuple[Case, ...]]) -> None:
    """The suite runs `wanted` of each op: every case was judged above."""
    monkeypatch.setattr(conformance, "cases", wanted)


def test_the_report_of_a_right_backend_has_no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    of = conformance.cases
    only(monkeypatch, lambda op: of(op)[1:3])
    reports = {report.op: report for report in conformance.conformance("cpu")}
    assert not [report.failed for report in reports.values() if report.failed]
    assert reports["select_blocks"].identical is True
    assert reports["codec"].identical is True
    assert reports["moe"].worst is not None
    assert 0 < reports["moe"].worst <= 1
    assert reports["moe"].served == {"winnow.ops.moe.cpu": 2}
    assert "winnow.ops.moe.cpu (2)" in conformance.render(list(reports.values()))


def test_the_report_says_which_of_two_modules_served_each_call() -> None:
    either = ByCase("queries in bf16", is_bf16, CPU.sparse_attention, reference.sparse_attention)
    mixed = replace(CPU, sparse_attention=either)
    of = conformance.cases("sparse_attention")
    names = ("verify kv bf16 bf16 top-4", "verify kv fp32 fp32 top-4", "verify kv fp8 bf16 top-4")
    with pytest.MonkeyPatch.context() as patch:
        only(patch, lambda op: tuple(case for case in of if case.name in names))
        report = conformance._report("sparse_attention", mixed, lambda op: getattr(mixed, op))
    assert report.served == {
        "winnow.ops.sparse_attention.cpu": 2,
        "winnow.ops.sparse_attention.reference": 1,
    }
    assert (report.cases, report.failed) == (3, ())


def is_bf16(q: torch.Tensor, ids: Any, batch: Any, pages: Any) -> bool:
    return q.dtype is torch.bfloat16


def test_a_selection_with_ties_broken_upwards_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    of = conformance.cases
    only(monkeypatch, lambda op: tuple(case for case in of(op) if "all keys equal" in case.name))

    def higher_wins(index_q: Any, index: Any, batch: Any, topk: int) -> torch.Tensor:
        ids = CPU.select_blocks(index_q, index, batch, topk)
        wide = batch.positions > 1024
        ids[wide, :, 0] += 1
        return ids

    wrong = replace(CPU, select_blocks=higher_wins)
    report = conformance._report("select_blocks", wrong, lambda op: getattr(wrong, op))
    assert report.identical is False
    assert report.failed


def test_an_output_out_of_tolerance_or_with_hidden_nan_is_an_error() -> None:
    want = torch.tensor([1.0, 2.0, float("nan")])
    assert error(want.clone(), want) == 0.0
    assert error(torch.tensor([1.0, 2.0, 3.0]), want) == float("inf")
    assert error(torch.tensor([1.0, 2.2, float("nan")]), want) == pytest.approx(0.2 / 5**0.5)
    assert error(torch.tensor([1.0, 2.0]), want) == float("inf")
