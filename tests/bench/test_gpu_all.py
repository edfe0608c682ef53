"""What benchmarks/gpu_all.py runs, and what it takes for fine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
GIVEN = {"folder": "/folder", "commit": "abc"}


@pytest.fixture
def programme(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("gpu_all")


def python(programme: Any, name: str, code: str, stage: str = "one", **more: Any) -> Any:
    return programme.Part(name, stage, ("-c", code), more.pop("most_s", 30), **more)


def test_every_part_has_a_name_of_its_own_and_a_stage_without_gaps(programme: Any) -> None:
    parts = programme.parts()
    assert Counter(part.name for part in parts).most_common(1)[0][1] == 1
    stages = [part.stage for part in parts]
    turns = [a for a, b in zip(stages, [*stages[1:], ""], strict=True) if a != b]
    assert len(turns) == len(set(stages))


def test_every_script_and_test_file_that_a_part_names_exists(programme: Any) -> None:
    named = [word for part in programme.parts() for word in part.words if word.endswith(".py")]
    assert len(named) > 20
    assert all((ROOT / word).is_file() for word in named)
    files = {path.name for path in (ROOT / "tests/ops").glob("test_*_hopper.py")}
    assert files == {Path(word).name for word in named if word.startswith("tests/")}


def test_what_is_timed_runs_alone_and_before_all_checks(programme: Any) -> None:
    stages = [part.stage for part in programme.parts()]
    assert stages[:4] == ["kernels", "fp8", "steps", "step"]
    assert all(stages.count(stage) == 1 for stage in stages[:4])


@pytest.mark.parametrize(
    ("code", "fine"), [("pass", True), ("raise SystemExit(1)", False), ("x", False)]
)
def test_only_parts_that_end_well_are_fine(
    programme: Any, tmp_path: Path, code: str, fine: bool
) -> None:
    others = [python(programme, "a", "print(1)"), python(programme, "b", "print(2)", "two")]
    assert programme.all_of([*others, python(programme, "c", code, "two")], tmp_path, GIVEN) is fine
    assert (tmp_path / "a.txt").read_text().endswith("\n\n1\n")
    assert (tmp_path / "b.txt").read_text().endswith("\n\n2\n")


def test_a_record_begins_with_the_command_the_machine_and_the_commit(
    programme: Any, tmp_path: Path
) -> None:
    part = python(programme, "a", "import os; print(os.environ['X'])", env=(("X", "5"),))
    programme.all_of([part], tmp_path, GIVEN)
    command, conditions, empty, printed = (tmp_path / "a.txt").read_text().splitlines()
    assert command.startswith(f"X=5 {sys.executable} -c ")
    assert '"commit": "abc"' in conditions
    assert '"torch": ' in conditions
    assert (empty, printed) == ("", "5")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_late_part_is_ended_with_its_children_and_has_failed(
    programme: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import subprocess, sys, time; c = 'import time; time.sleep(60)'; "
    code += "print(subprocess.Popen([sys.executable, '-c', c]).pid, flush=True); time.sleep(60)"
    late = python(programme, "late", code, most_s=2.0)
    assert not programme.all_of([late, python(programme, "good", "pass")], tmp_path, GIVEN)
    printed = capsys.readouterr().out
    assert f"status {programme.LATE}  late" in printed
    assert f"FAILED: {tmp_path / 'late'}.txt" in printed
    assert "1 of 2 parts are fine" in printed
    child = int((tmp_path / "late.txt").read_text().split()[-1])
    assert child != os.getpid()
    # It has been sent the signal, and ends when it runs next.
    end = time.monotonic() + 20
    while runs(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not runs(child)


def test_a_part_that_lacks_what_its_words_stand_for_is_not_run_and_not_fine(
    programme: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = programme.Part("needy", "one", ("-c", "print(1)", "{answers}"), 30)
    assert not programme.all_of([part], tmp_path, GIVEN)
    assert "NOT RUN" in capsys.readouterr().out
    assert not (tmp_path / "needy.txt").exists()
    assert programme.all_of([part], tmp_path, GIVEN | {"answers": "here"})


def test_an_unknown_part_is_an_error_in_words(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_all.py"), str(tmp_path), "--part", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no part begins with nothing: see --list" in done.stderr
