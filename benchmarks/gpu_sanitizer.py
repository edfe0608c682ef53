"""compute-sanitizer over the CUDA C++ kernels: the tests of backend hopper's kernels, under it.

Each test file runs in processes of its own, one a tool, several at once; all of it takes many
minutes. memcheck looks at the build that ships. racecheck follows a barrier's arrivals by thread,
so it looks at the build in which every lane arrives for itself
(`winnow.ops.cuda_build.FOR_RACECHECK`), and in which the refill of a slot of sparse decode waits
for those arrivals too, where a counter alone says that all have left; the two differ in nothing
else. Kernels are told apart by their names: all of ours, and none of Triton's, lie in an unnamed
namespace. A run that loads no kernel with such a name fails.

    python benchmarks/gpu_sanitizer.py [--tests NAME]... [--tool memcheck|racecheck]... [--jobs N]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parent.parent / "tests/ops"
TESTS = sorted(path.name[5:-10] for path in HOME.glob("test_*_hopper.py"))
TOOLS = ("memcheck", "racecheck")
WITHOUT_SHARED_MEMORY = ("inputs",)
"""Nothing there for racecheck to look at."""
UNNAMED = "GLOBAL__N_"
"""In the mangled name of whatever lies in an unnamed namespace."""
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
CHILD = """
import sys
from pathlib import Path
import pytest
failed = pytest.main(["-q", "-x", "-p", "no:cacheprovider", sys.argv[1]])
maps = Path("/proc/self/maps").read_text().replace(" (deleted)", "").splitlines()
loaded = {line.split()[-1] for line in maps if "/winnow/" in line and line.endswith(".so")}
ours = [name for name in loaded if b"%s" in Path(name).read_bytes()]
print("kernels of", *sorted(Path(name).name for name in ours))
sys.exit(int(failed) or not ours)
"""


@dataclass(frozen=True)
class Outcome:
    tests: str
    tool: str
    found: int | None
    """Errors or hazards; None if the tool gave no summary."""
    seconds: float
    passed: bool
    """The tests, under the tool."""
    output: str


def run(tests: str, tool: str, threads: int, limit_s: float) -> Outcome:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [
        *(sanitizer, "--tool", tool, "--kernel-name", f"kns={UNNAMED}", "--print-limit", "6"),
        *(sys.executable, "-c", CHILD % UNNAMED, str(HOME / f"test_{tests}_hopper.py")),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if tool == "racecheck":
        env["WINNOW_RACECHECK"] = "1"
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, env=env, text=True, timeout=limit_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        output, passed = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        kept = error.stdout or b""
        output = kept.decode() if isinstance(kept, bytes) else kept
        output, passed = f"{output}\nstopped after {limit_s:.0f} s", False
    summary = SUMMARY.search(output)
    found = int(summary[1]) if summary else None
    return Outcome(tests, tool, found, time.monotonic() - begun, passed, output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", action="append", choices=TESTS)
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--jobs", type=int, default=8, help="processes at once")
    parser.add_argument("--limit", type=float, default=600, metavar="S", help="of a process")
    args = parser.parse_args()
    pairs = [
        (tests, tool)
        for tool in args.tool or TOOLS
        for tests in args.tests or TESTS
        if tool != "racecheck" or tests not in WITHOUT_SHARED_MEMORY
    ]
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    print(f"{'tests':18} {'tool':10} {'found':>6}  {'tests':7} {'s':>5}")
    clean = True
    with ThreadPoolExecutor(args.jobs) as pool:
        for outcome in pool.map(lambda pair: run(pair[0], pair[1], threads, args.limit), pairs):
            good = outcome.found == 0 and outcome.passed
            clean = clean and good
            print(
                f"{outcome.tests:18} {outcome.tool:10} "
                f"{'none' if outcome.found is None else outcome.found:>6}  "
                f"{'pass' if outcome.passed else 'FAIL':7} {outcome.seconds:5.0f}",
                flush=True,
            )
            if not good:
                print("\n".join(outcome.output.splitlines()[-60:]), flush=True)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
