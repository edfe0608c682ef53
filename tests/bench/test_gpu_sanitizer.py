"""What benchmarks/gpu_sanitizer.py leaves out, and what it takes for clean."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from winnow.ops.cuda_build import build, compiler

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
KERNELS = [f"_ZN41_GLOBAL__N__f451f799_9_expand_cu_65ec5e80{name}Ev" for name in ("3one", "3two")]
USES = re.compile(r"\s(LDSM?|STSM?|ATOMS|SYNCS|UBLKCP|UTMA[A-Z]*|LDGSTS|HGMMA|STAS|REDAS)[.\s]")
"""Instructions that read or write shared memory."""
SUMMARY = {
    "memcheck": "========= ERROR SUMMARY: {} errors",
    "racecheck": "========= RACECHECK SUMMARY: {} hazards displayed (0 errors, 0 warnings)",
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("gpu_sanitizer")


@pytest.fixture
def sanitizer(module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "SOURCES", [Path("expand.cu")])
    monkeypatch.setattr(module, "NOT_UNDER_RACECHECK", {})
    monkeypatch.setattr(module, "WITHOUT_SHARED_MEMORY", {})
    return module


def process(sanitizer: Any, folder: Path, tool: str, **change: Any) -> Any:
    """One that ran two tests of two kernels and found nothing, but for `change`."""
    given = {"found": 0, "passed": 2, "launched": KERNELS, "status": 0} | change
    lines = ["@ wanted norm::one", "@ wanted norm::two", "@ begins norm::one"]
    lines += [f"@ passed 0.1 0.1 norm::{name}" for name in ("one", "two")[: given["passed"]]]
    lines += [] if given["found"] is None else [SUMMARY[tool].format(given["found"])]
    output, launches = folder / f"{tool}.output", folder / f"{tool}.launches"
    output.write_text("\n".join(lines))
    names = [*(f"has {name}" for name in KERNELS), *(f"launched {n}" for n in given["launched"])]
    launches.write_text("".join(f"{name}\n" for name in names))
    return sanitizer.Process(tool, SimpleNamespace(returncode=given["status"]), output, launches)


@pytest.mark.parametrize("tool", SUMMARY)
@pytest.mark.parametrize(
    ("change", "clean"),
    [
        ({}, True),
        ({"found": 1}, False),
        ({"found": None}, False),
        ({"passed": 1}, False),
        ({"launched": KERNELS[:1]}, False),
        ({"launched": []}, False),
        ({"status": 1}, False),
    ],
)
def test_only_a_run_that_saw_everything_and_found_nothing_is_clean(
    sanitizer: Any, tmp_path: Path, tool: str, change: dict[str, Any], clean: bool
) -> None:
    one = process(sanitizer, tmp_path, tool, **change)
    assert sanitizer.verdict([one], tool, whole=True, slowest=0) is clean


def test_a_source_whose_library_was_never_loaded_is_missed(
    sanitizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitizer, "SOURCES", [Path("expand.cu"), Path("norm.cu")])
    one = process(sanitizer, tmp_path, "memcheck")
    assert not sanitizer.verdict([one], "memcheck", whole=True, slowest=0)
    assert sanitizer.verdict([one], "memcheck", whole=False, slowest=0)


@pytest.mark.parametrize(("tool", "clean"), [("memcheck", False), ("racecheck", True)])
def test_racecheck_need_not_see_a_kernel_without_shared_memory(
    sanitizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, clean: bool
) -> None:
    monkeypatch.setattr(sanitizer, "WITHOUT_SHARED_MEMORY", {"expand": ("two",)})
    one = process(sanitizer, tmp_path, tool, launched=KERNELS[:1])
    assert sanitizer.verdict([one], tool, whole=True, slowest=0) is clean


def disassembler() -> str | None:
    """cuobjdump of the toolkit, or the one in Triton's package."""
    found = find_spec("triton")
    places = (
        [f"{one}/backends/nvidia/bin" for one in found.submodule_search_locations or ()]
        if found
        else []
    )
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *places]))


@pytest.mark.skipif(compiler() is None, reason="needs nvcc")
@pytest.mark.skipif(disassembler() is None, reason="needs cuobjdump")
def test_kernels_said_to_be_without_shared_memory_are_those_that_never_use_it(module: Any) -> None:
    for source in module.SOURCES:
        named = module.WITHOUT_SHARED_MEMORY.get(source.stem, ())
        texts = [path.read_text() for path in (source, *source.parent.glob("shares.cuh"))]
        if not any(f" {name}(" in text for name in named for text in texts):
            continue
        command = [str(disassembler()), "-sass", str(build(source))]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        kernels = code.split("Function : ")[1:]
        assert kernels, source
        for kernel in kernels:
            name = kernel.split()[0]
            assert module.is_without_shared_memory(name) == (not USES.search(kernel)), name


@pytest.mark.parametrize("tool", SUMMARY)
def test_what_is_left_out_leaves_smaller_cases_of_the_same_tests(
    sanitizer: Any, tmp_path: Path, tool: str
) -> None:
    words = [BENCHMARKS / "gpu_sanitizer_tests.py", tool, "0.5", tmp_path, "-1", *sanitizer.FILES]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    said = sanitizer.SAID.findall(done.stdout)
    assert {word for word, _ in said} == {"wanted", "left out"}, done.stdout[-2000:]
    assert {name.split("::")[0] for _, name in said} == set(sanitizer.TESTS)
    cases = Counter((word, name.split("[")[0]) for word, name in said)
    module = import_module("gpu_sanitizer_tests")
    tables = [module.TOO_LARGE] + [module.TOO_MUCH_SHARED_MEMORY] * (tool == "racecheck")
    rules = {key: [table[key] for table in tables if key in table] for t in tables for key in t}
    for (file, test), own in rules.items():
        assert cases["left out", f"{file}::{test}"], f"{test}: the rule leaves nothing out"
        assert (module.always in own) != bool(cases["wanted", f"{file}::{test}"]), test


def test_processes_begin_at_their_share_of_the_tests(
    sanitizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("gpu_sanitizer_tests")
    names = ["dense"] * 8 + ["moe"] * 2
    items = [SimpleNamespace(path=Path(f"test_{name}_hopper.py")) for name in names]
    assert module.turned(items, 0.0) == items
    assert module.turned(items, 0.25) == items[4:] + items[:4]
    assert module.turned(items, 0.5) == items[8:] + items[:8]
    assert module.turned(items, 0.75) == items[9:] + items[:9]


@pytest.mark.skipif(compiler() is None, reason="needs nvcc")
def test_a_library_says_which_kernels_it_holds(
    sanitizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = ROOT / "winnow/ops/norm/csrc/norm.cu"
    load = "from winnow.ops.cuda_build import library; from pathlib import Path; "
    load += f"library(Path({str(source)!r}), {{}})"
    env = sanitizer.environment("memcheck") | {"WINNOW_LAUNCHES": str(tmp_path / "launches")}
    subprocess.run([sys.executable, "-c", load], env=os.environ | env, check=True, cwd=ROOT)
    lines = (tmp_path / "launches").read_text().splitlines()
    assert len(lines) == 2
    assert all(line.startswith("has ") and sanitizer.UNNAMED.search(line) for line in lines)
