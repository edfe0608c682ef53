"""Everything that is checked and timed on a Hopper GPU, by one command: what a change of a kernel
needs before it lands, and the records of a commit.

Owns the order. What is timed runs alone and first; checks run side by side where they leave each
other time enough; what makes launches slow comes last, since processes share a GPU in slices of
milliseconds. A part is a process that writes NAME.txt into the folder: its command, the machine,
versions and commit, then what it printed. A part that is late is ended and has failed.

    python benchmarks/gpu_all.py FOLDER [--peers DIR] [--answers FILE] [--part NAME]...

--answers names what `gpu_tokens.py --tokens 16 --write-cpu FILE` left on any machine, so that no
CPU's engine answers here; without it the parts that need it are not run, and the whole is not fine.
The choices-*.npz are for `gpu_same_choices.py --against`, anywhere too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from gpu_same_choices import CASES
from gpu_tokens import CHECKPOINTS, DTYPES

from winnow.bench.machine import commit, machine, software

ROOT = Path(__file__).resolve().parent.parent
GPU_TESTS = "test_*_hopper.py"
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
MEMCHECK = (SANITIZER, "--tool", "memcheck", "--error-exitcode", "9")
NAMED = re.compile(r"{(\w+)}")
LATE = 124
"""The status of a part that was ended, as timeout(1) has it."""


@dataclass(frozen=True)
class Part:
    """A process. Parts of one stage, one after another in the list, run side by side. `words` are
    those after the interpreter; {folder}, {answers} and {commit} stand for what is given."""

    name: str
    stage: str
    words: tuple[str, ...]
    most_s: float
    env: tuple[tuple[str, str], ...] = ()
    memcheck: bool = False

    def runs_with(self, given: Mapping[str, str]) -> bool:
        """Whether all that its words stand for is given."""
        return all(name in given for word in self.words for name in NAMED.findall(word))


def parts(peers: Path | None = None) -> list[Part]:
    """All, in the order in which they run."""
    return [
        *timed(peers), *checks_of_ops(), *checks_of_engines(), *same_choices(),
        Part("serve", "serve", ("benchmarks/gpu_serve.py",), 150), *under_tools(),
    ]  # fmt: skip


def timed(peers: Path | None) -> list[Part]:
    kernels = "-m winnow bench kernels --backend hopper --commit {commit} -o {folder}/kernels.jsonl"
    steps = "benchmarks/gpu_engine.py --part steps --commit {commit} --out {folder}/engine.jsonl"
    step = "-m winnow bench step minimax-m3.1-flash --random-weights --layers 4 --device cuda"
    state = "--kv-format nvfp4 --index-format nvfp4"
    trace = "benchmarks/gpu_op_trace.py"
    fp8 = ("--kv-format", "fp8", "--index-format", "fp8", "select_blocks decode 1 x 524288")
    beside = () if peers is None else ("--peers", str(peers.resolve()))
    return [
        Part("kernels", "kernels", (*kernels.split(), *beside), 300),
        Part("fp8", "fp8", (*kernels.split(), "--kv-format", "fp8", "--index-format", "fp8"), 120),
        Part("steps", "steps", tuple(steps.split()), 120),
        Part("step", "step", (*step.split(), *state.split(), "--context", "8192"), 120),
        Part("trace", "trace", (trace,), 90),
        Part("trace-fp8", "trace-fp8", (trace, *fp8), 60),
        Part("power", "power", ("benchmarks/gpu_power.py",), 90),
    ]


def checks_of_ops() -> list[Part]:
    conformance = ("-m", "winnow", "bench", "conformance", "--backend", "hopper")
    tests = [path.relative_to(ROOT) for path in sorted((ROOT / "tests/ops").glob(GPU_TESTS))]
    return [
        Part("conformance", "ops", conformance, 240),
        *(
            Part(path.stem, "ops", ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)), 240)
            for path in tests
        ),
    ]


def checks_of_engines() -> list[Part]:
    tokens = "benchmarks/gpu_tokens.py"
    against = (tokens, "--only", "cpu", "--tokens", "16", "--cpu-answers", "{answers}")
    return [
        Part("random-steps", "engines", ("benchmarks/gpu_random_steps.py",), 150),
        *(
            Part(f"replays-{one}", "engines", (tokens, "--only", "replays", "--weights", one), 150)
            for one in ("bf16", "nvfp4")
        ),
        *(
            Part(
                f"tokens-{name}-{dtype}",
                "tokens",
                (*against, "--checkpoint", name, "--dtype", dtype),
                180,
            )
            for name in CHECKPOINTS
            for dtype in DTYPES
        ),
    ]


def same_choices() -> list[Part]:
    """Where state is quantised, both sides; else the answers alone, for a CPU elsewhere."""
    found = []
    for case in CASES:
        name = "choices-" + case.name.replace(", ", "-").replace(" ", "-")
        words = ("benchmarks/gpu_same_choices.py", "--case", case.name)
        written = () if case.given else ("--write", f"{{folder}}/{name}.npz")
        found.append(Part(name, "choices", (*words, *written), 240))
    return found


def under_tools() -> list[Part]:
    """The kernels' tests, then the engine, captured and with an allocation for every tensor."""
    eager = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
    steps = ("benchmarks/gpu_random_steps.py", "--seconds", "60")
    return [
        Part("sanitizer", "sanitizer", ("benchmarks/gpu_sanitizer.py",), 400),
        Part("memcheck-captured", "memcheck", steps, 180, memcheck=True),
        Part("memcheck-eager", "memcheck", (*steps, "--eager"), 180, eager, memcheck=True),
    ]


def run(
    stage: Sequence[Part], folder: Path, given: Mapping[str, str]
) -> list[tuple[Part, int, float]]:
    """Each part's status and seconds, those of a stage side by side."""
    begun = time.monotonic()
    threads = str(max(1, (os.cpu_count() or 1) // len(stage)))
    started = []
    for part in stage:
        words = [word.format(**given) for word in part.words]
        command = [*(MEMCHECK if part.memcheck else ()), sys.executable, *words]
        output = (folder / f"{part.name}.txt").open("w")
        output.write(f"{' '.join([*(f'{k}={v}' for k, v in part.env), *command])}\n")
        output.write(json.dumps({**machine(), **software(), "commit": given["commit"]}) + "\n\n")
        output.flush()
        # A part alone has all cores; several that start a thread a core each stand in their way.
        env = {} if len(stage) == 1 else {"OMP_NUM_THREADS": threads}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        own = {**os.environ, **env, **dict(part.env), "PYTHONPATH": path}
        process = subprocess.Popen(
            command, cwd=ROOT, env=own, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        output.close()
        started.append((part, process))
    ended: dict[str, tuple[int, float]] = {}
    while len(ended) < len(started):
        time.sleep(0.2)
        spent = time.monotonic() - begun
        for part, process in started:
            if part.name in ended:
                continue
            status = process.poll()
            if status is None and spent > part.most_s:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = LATE
            if status is not None:
                ended[part.name] = status, spent
                print(f"{spent:5.0f} s  status {status:3d}  {part.name}", flush=True)
    return [(part, *ended[part.name]) for part in stage]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="for what parts print and write")
    parser.add_argument(
        "--peers", type=Path, help="folder of benchmarks/peers/fetch.py; default: time no peers"
    )
    parser.add_argument("--answers", help="of the CPU; without them what needs them is not fine")
    parser.add_argument("--commit", default=commit(), help="where this is not a git tree")
    parser.add_argument("--part", action="append", metavar="NAME", help="names that begin so")
    parser.add_argument("--list", action="store_true", help="print names and commands, run nothing")
    args = parser.parse_args()
    given = {
        "folder": str(args.folder.resolve()), "commit": args.commit,
        **({"answers": str(Path(args.answers).resolve())} if args.answers else {}),
    }  # fmt: skip
    wanted = [part for part in parts(args.peers) if part.name.startswith(tuple(args.part or [""]))]
    if not wanted:
        parser.error(f"no part begins with {' or '.join(args.part)}: see --list")
    if args.list:
        for part in wanted:
            print(
                f"{part.name} ({part.stage}, {part.most_s:.0f} s at most): {' '.join(part.words)}"
            )
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    return 0 if all_of(wanted, args.folder, given) else 1


def all_of(wanted: Sequence[Part], folder: Path, given: Mapping[str, str]) -> bool:
    """Run them, stage by stage; print what failed and what was left out; whether neither is so."""
    chosen = [part for part in wanted if part.runs_with(given)]
    missing = [part for part in wanted if not part.runs_with(given)]
    failed: list[str] = []
    for _, stage in groupby(chosen, key=lambda part: part.stage):
        failed += [part.name for part, status, _ in run(list(stage), folder, given) if status]
    for part in missing:
        print(f"NOT RUN, as not all of {' '.join(part.words)} is given: {part.name}")
    for name in failed:
        print(f"FAILED: {folder / name}.txt")
    print(f"{len(chosen) - len(failed)} of {len(wanted)} parts are fine")
    return not failed and not missing


if __name__ == "__main__":
    sys.exit(main())
