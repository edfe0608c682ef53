"""compute-sanitizer over the CUDA C++ kernels: the tests of backend hopper's kernels, under it.

Several processes a tool divide the tests among themselves (`gpu_sanitizer_tests.py`, which also
says what it leaves out: a tool needs every kernel and every path, not large shapes). memcheck looks
at the build that ships. racecheck follows a barrier's arrivals by thread, so it looks at the build
in which every lane arrives for itself (`winnow.ops.cuda_build.FOR_RACECHECK`), and in which the
refill of a slot of sparse decode waits for those arrivals too, where a counter alone says that all
have left; the two differ in nothing else. Kernels are told apart by their names: all of ours, and
none of Triton's, lie in an unnamed namespace.

Both builds are linked with `gpu_launches.cpp`, which writes down what a library holds and what is
launched. A run of all tests fails if a kernel of any source was never launched under a tool (of
racecheck: one that uses shared memory), so leaving out the large tests loses none. It prints all
names.

    python benchmarks/gpu_sanitizer.py [--tests NAME]... [--tool memcheck|racecheck]... [--jobs N]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpu_sanitizer_tests import MARK, name_of

HERE = Path(__file__).resolve().parent
FILES = sorted((HERE.parent / "tests/ops").glob("test_*_hopper.py"))
SOURCES = sorted((HERE.parent / "winnow/ops").glob("*/csrc/*.cu"))
TESTS = [name_of(path) for path in FILES]
TOOLS = ("memcheck", "racecheck")
WITHOUT_SHARED_MEMORY = {
    "insert": ("insert_rows",),
    "expand": ("expand",),
    "ranges": ("clear", "add_parts"),
    "decode": ("combine",),
    "prefill_rows": ("combine",),
    "prefill_lists": ("combine", "fill", "rank"),
}
"""Sources and their kernels in which there is nothing for racecheck to look at; a test compares
them with the machine code."""
NOT_UNDER_RACECHECK = {"inputs": "insert", "linear above 1,024 rows": "expand"}
"""Tests, and the source that is then never loaded."""
JOBS = {"memcheck": 6, "racecheck": 8}
"""Processes that divide the tests, for 16 cores."""
LAUNCHES = HERE / "gpu_launches.cpp"
WRAPPED = ("__cudaRegisterFunction", "__cudaGetKernel", "__cudaLaunchKernel", "cudaLaunchKernelExC")
"""What `gpu_launches.cpp` stands before."""
UNNAMED = re.compile(r"(_GLOBAL__N__[0-9a-f]{8}_\d+_(\w+?)_cu_[0-9a-f]{8})(\d+)")
"""In the mangled name of what lies in an unnamed namespace, of which each source has one: the
namespace, in it the source, and the length of the name that follows."""
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
REPORT = re.compile(r"^=+ (?:Invalid|Error: |Warning: |Program hit|Barrier)", re.MULTILINE)
SAID = re.compile(rf"^{MARK} (wanted|left out|begins|passed|FAILED) (.*)$", re.MULTILINE)
BUILD = "import sys; from pathlib import Path; from winnow.ops.cuda_build import build; "
BUILD += "build(Path(sys.argv[1]))"
EVERY_S = 5
"""How often a line says how far the tools are."""


@dataclass(frozen=True)
class Process:
    """One of those that divide the tests under a tool."""

    tool: str
    popen: subprocess.Popen[bytes]
    output: Path
    launches: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def said(self) -> dict[str, list[str]]:
        """Of each word of SAID, the tests; those of `passed` with their times before them."""
        found: dict[str, list[str]] = {}
        for match in SAID.finditer(self.text()):
            found.setdefault(match[1], []).append(match[2])
        return found

    def found(self) -> int | None:
        """Errors or hazards; None if the tool gave no summary."""
        summary = SUMMARY.search(self.text())
        return int(summary[1]) if summary else None

    def names(self, word: str) -> set[str]:
        if not self.launches.exists():
            return set()
        lines = (line.split() for line in self.launches.read_text().splitlines())
        return {name for first, name in lines if first == word}


def environment(tool: str) -> dict[str, str]:
    """In which libraries are built that write down their launches, apart from those that ship."""
    text = LAUNCHES.read_text() + " ".join(WRAPPED)
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    cache = home / f"winnow-launches-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
    link = f"{LAUNCHES} -Xlinker {','.join(f'--wrap={name}' for name in WRAPPED)}"
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "NVCC_APPEND_FLAGS": f"{os.environ.get('NVCC_APPEND_FLAGS', '')} {link}".strip(),
    }
    if tool == "racecheck":
        env["WINNOW_RACECHECK"] = "1"
    return env


def build(tools: list[str], jobs: int) -> None:
    """Every source, so that no process under a tool does."""

    def one(pair: tuple[str, Path]) -> None:
        tool, source = pair
        subprocess.run(
            [sys.executable, "-c", BUILD, str(source)], env=environment(tool), check=True
        )

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, [(tool, source) for tool in tools for source in SOURCES]))


def files_of(tool: str, names: list[str]) -> list[Path]:
    """Those in which there is something for this tool to look at."""
    without = NOT_UNDER_RACECHECK if tool == "racecheck" else {}
    return [path for path in FILES if name_of(path) in names and name_of(path) not in without]


def start(
    tool: str, number: int, jobs: int, files: list[Path], folder: Path, limit_s: float
) -> Process:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    claims = folder / tool
    claims.mkdir(exist_ok=True)
    launches = folder / f"{tool}-{number}.launches"
    command = [
        *(sanitizer, "--tool", tool, "--kernel-name", "kns=GLOBAL__N_", "--print-limit", "6"),
        *(sys.executable, str(HERE / "gpu_sanitizer_tests.py"), tool, str(number / jobs)),
        *(str(claims), str(limit_s), *(str(path) for path in files)),
    ]
    env = environment(tool) | {"WINNOW_LAUNCHES": str(launches), "OMP_NUM_THREADS": "1"}
    output = folder / f"{tool}-{number}.output"
    with output.open("wb") as file:
        popen = subprocess.Popen(
            command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Process(tool, popen, output, launches)


def wait(processes: list[Process], tools: list[str], most_s: float) -> None:
    """Until all have ended or are stopped, saying how far they are."""
    begun = time.monotonic()
    try:
        while any(process.popen.poll() is None for process in processes):
            spent = time.monotonic() - begun
            if spent > most_s:
                break
            parts = [progress([p for p in processes if p.tool == tool], tool) for tool in tools]
            print(f"{spent:4.0f} s: {'; '.join(parts)}", flush=True)
            time.sleep(min(EVERY_S, 1 + most_s - spent))
    finally:
        for process in processes:
            if process.popen.poll() is None:
                os.killpg(process.popen.pid, signal.SIGKILL)
                process.popen.wait()


def progress(processes: list[Process], tool: str) -> str:
    said = [process.said() for process in processes]
    wanted = max(len(one.get("wanted", ())) for one in said)
    passed, failed = (sum(len(one.get(word, ())) for one in said) for word in ("passed", "FAILED"))
    reports = sum(len(REPORT.findall(process.text())) for process in processes)
    return f"{tool} {passed} of {wanted} tests passed, {failed} failed, {reports} reports"


def verdict(processes: list[Process], tool: str, whole: bool, slowest: int) -> bool:
    """Print what a tool found; whether it is clean and has seen all there is."""
    said = [process.said() for process in processes]
    wanted = set(max((one.get("wanted", []) for one in said), key=len))
    passed = [line.split(maxsplit=2) for one in said for line in one.get("passed", ())]
    missing = sorted(wanted - {name for *_, name in passed})
    has, launched = (set().union(*(p.names(w) for p in processes)) for w in ("has", "launched"))
    racecheck = tool == "racecheck"
    has = {name for name in has if not (racecheck and is_without_shared_memory(name))}
    launched &= has
    never = sorted(has - launched)
    sources = {match[1] for name in has if (match := UNNAMED.search(name))}
    expected = len(SOURCES) - (racecheck and len(NOT_UNDER_RACECHECK))
    founds = [process.found() for process in processes]
    clean = not missing and bool(wanted) and all(found == 0 for found in founds)
    for process in processes:
        if process.found() != 0 or process.popen.returncode:
            clean = False
            print(f"{process.output.name}, exit status {process.popen.returncode}:")
            print("\n".join(tail(process)), flush=True)
    for seconds, cpu, name in sorted(passed, key=lambda one: -float(one[0]))[:slowest]:
        print(f"{tool}: {seconds} s, {cpu} s of a core: {name}")
    without: Counter[str] = Counter(one.split("[")[0] for one in said[0].get("left out", ()))
    for name, count in sorted(without.items()):
        print(f"{tool}: left out {count} of {name}")
    for name in missing:
        print(f"{tool}: not passed: {name}")
    for name in sorted(launched):
        print(f"{tool}: launched {name}")
    for name in never:
        print(f"{tool}: NEVER LAUNCHED {name}")
    print(
        f"{tool}: {'none' if None in founds else sum(f or 0 for f in founds)} found; "
        f"{len(passed)} of {len(wanted)} tests passed, {without.total()} left out; "
        f"{len(launched)} of {len(has)} kernels launched, of {len(sources)} of {expected} sources",
        flush=True,
    )
    return clean and not (whole and (never or len(sources) != expected))


def is_without_shared_memory(kernel: str) -> bool:
    """By its mangled name."""
    match = UNNAMED.search(kernel)
    if not match:
        return False
    name = kernel[match.end() :][: int(match[3])]
    return name in WITHOUT_SHARED_MEMORY.get(match[2], ())


def tail(process: Process) -> list[str]:
    """The end of a process's output, without what is said elsewhere."""
    lines = process.text().splitlines()
    return [one for one in lines if one and not one.startswith((f"{MARK} w", f"{MARK} l"))][-60:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", action="append", choices=TESTS)
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--jobs", type=int, help="processes a tool; default: made for 16 cores")
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="for tests to begin")
    parser.add_argument("--grace", type=float, default=60, metavar="S", help="for them to end")
    parser.add_argument("--slowest", type=int, default=10, metavar="N", help="tests to print")
    args = parser.parse_args()
    files = {tool: files_of(tool, args.tests or TESTS) for tool in args.tool or TOOLS}
    tools = [tool for tool in files if files[tool]]
    if not tools:
        parser.error("in these tests there is nothing for that tool to look at")
    # So that those under the tools end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begun = time.monotonic()
    jobs = {tool: args.jobs or JOBS[tool] for tool in tools}
    build(tools, sum(jobs.values()))
    print(f"built in {time.monotonic() - begun:.0f} s", flush=True)
    clean = True
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            start(tool, number, jobs[tool], files[tool], Path(folder), args.limit)
            for tool in tools
            for number in range(jobs[tool])
        ]
        wait(processes, tools, args.limit + args.grace)
        for tool in tools:
            own = [process for process in processes if process.tool == tool]
            clean = verdict(own, tool, args.tests is None, args.slowest) and clean
    print(f"{'clean' if clean else 'NOT CLEAN'} after {time.monotonic() - begun:.0f} s")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
