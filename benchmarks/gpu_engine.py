"""The engine on one GPU: every op against its definition, tokens against the CPU's, and the time of
steps at real widths, by part.

Every part runs in a process of its own, so that a fault in one kernel ends that part alone. Checks
run side by side, and what is timed runs once before among them, so that its kernels are compiled;
then it runs alone. A time is between two events on the device, with the launches of the whole step
queued up behind a pause, so that it holds no time of the host's.

    python benchmarks/gpu_engine.py [--out FILE] [--commit NAME] [--seconds N] [--part NAME]
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from winnow.bench.conformance import KERNEL_OPS, conformance, render
from winnow.bench.machine import commit
from winnow.bench.parts import WHOLE
from winnow.bench.record import Record, append
from winnow.bench.step import DECODE, PREFILL, Shape, Steps, step_records
from winnow.bench.timing import BETWEEN, HEAD, PARTS
from winnow.config import EngineConfig, SamplingParams
from winnow.engine.build import build_engine
from winnow.engine.engine import Engine
from winnow.engine.llm import LLM
from winnow.engine.storage import PageStorage
from winnow.model.checkpoint import convert, load_checkpoint, make_tiny, read_spec
from winnow.model.transformer import Transformer
from winnow.model.weights import ModelWeights
from winnow.ops.batch import Batch
from winnow.ops.sample import SampleRow
from winnow.ops.table import Kernels, kernels, why_not
from winnow.spec.formats import BF16, cache_format
from winnow.spec.model import BLOCK_TOKENS
from winnow.spec.page import RowLayout

BACKENDS = ("cuda", "hopper")
TIMED = "steps"
TIMED_SECONDS = 60
"""Kept for the timed part, which runs last."""
PAUSE_CYCLES = 40_000_000
"""About 20 ms: longer than it takes to launch a step of a few layers."""

MODEL, LAYERS = "minimax-m3.1-flash", 4
CONTEXT, CHUNK, BATCHES, SAMPLES = 8192, 2048, (1, 8, 64), 10

FORMATS = (("model", "model"), ("fp8", "fp8"), ("nvfp4", "nvfp4"))
PROMPTS, FORCED = (900, 90), 12
"""Tokens of two requests' prompts, one beyond what selection can take whole; then decode steps."""
MEDIAN_ERROR = 0.03
"""Relative L2 error of a row of logits; a row whose experts or blocks fell otherwise has more."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=str(Path(__file__).with_name("gpu-engine.jsonl")))
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--seconds", type=float, default=170.0, help="for all parts together")
    parser.add_argument("--part", help="run one part in this process")
    parser.add_argument("--warm", action="store_true", help="write no records")
    args = parser.parse_args()
    if args.part is not None:
        run_part(args.part, Path(args.out), args.commit, args.warm)
        return
    deadline = time.monotonic() + args.seconds
    served = [backend for backend in BACKENDS if why_not(backend) is None]
    for backend in BACKENDS:
        print(f"{backend}: {why_not(backend) or 'serves'}")
    checks = [f"conformance {backend} {op}" for backend in served for op in own_ops(backend)]
    checks += [f"tokens {backend}" for backend in served]
    own = ["--out", args.out, "--commit", args.commit]
    side_by_side([*checks, f"{TIMED} --warm"], own, deadline - TIMED_SECONDS)
    side_by_side([TIMED], own, deadline)


def own_ops(backend: str) -> list[str]:
    """The ops to check: those that no backend before this one serves by the same function."""
    before = BACKENDS[: BACKENDS.index(backend)]
    others = [kernels(other).served_by() for other in before if why_not(other) is None]
    own = kernels(backend).served_by()
    found = [op for op in KERNEL_OPS if own[op] not in (other[op] for other in others)]
    return found if others else ["codec", *found]


def side_by_side(parts: Sequence[str], options: Sequence[str], deadline: float) -> None:
    """Run each part in its own process; print what each wrote, and end those that are late."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        running = []
        for number, part in enumerate(parts):
            name, _, flag = part.partition(" --")
            command = [sys.executable, __file__, "--part", name, *options]
            with (Path(home) / str(number)).open("w") as log:
                running.append(
                    subprocess.Popen(
                        [*command, f"--{flag}"] if flag else command,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        # Processes that each start a thread a core stand in each other's way.
                        env={**os.environ, "OMP_NUM_THREADS": "2"},
                    )
                )
        for number, (part, process) in enumerate(zip(parts, running, strict=True)):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
                ended = f"status {process.returncode}"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                ended = "ended, as its time was over"
            seconds = time.monotonic() - begun
            print(f"== {part}: {ended}, {seconds:.0f} s after the start", flush=True)
            print((Path(home) / str(number)).read_text().rstrip(), flush=True)


def run_part(part: str, out: Path, commit_name: str, warm: bool) -> None:
    match part.split():
        case ["conformance", backend, op]:
            print(render(conformance(backend, (op,))))
        case ["tokens", backend]:
            tokens(backend, "cuda")
        case ["steps"]:
            steps(out, commit_name, warm)
        case _:
            raise SystemExit(f"no part {part!r}")


def tokens(backend: str, device: str) -> None:
    """A tiny model's logits and greedy tokens against those of the CPU backend, both in bf16."""
    with tempfile.TemporaryDirectory() as home:
        plain, quantised = Path(home) / "bf16", Path(home) / "nvfp4"
        make_tiny(plain)
        convert(plain, quantised)
        for checkpoint in (plain, quantised):
            forced(checkpoint, backend, device)
        greedy(plain, backend, device)


def forced(checkpoint: Path, backend: str, device: str) -> None:
    """Logits of the same tokens on both sides, in pages of another order on each."""
    spec = read_spec(checkpoint)
    sides = {
        name: Transformer(
            spec,
            load_checkpoint(checkpoint, spec, torch.bfloat16, progress=False, device=place),
            kernels(table),
        )
        for name, table, place in (("want", "cpu", "cpu"), ("got", backend, device))
    }
    for kv_format, index_format in FORMATS:
        want, got = (
            teacher_forced(sides[name], kv_format, index_format, seed)
            for name, seed in (("want", 1), ("got", 2))
        )
        errors = ((got - want).norm(dim=1) / want.norm(dim=1)).sort().values
        differ = got.argmax(1) != want.argmax(1)
        best = want.topk(2, dim=1).values
        margins = (best[:, 0] - best[:, 1])[differ]
        middle = float(errors[len(errors) // 2])
        verdict = "ok" if middle <= MEDIAN_ERROR and bool(got.isfinite().all()) else "FAILED"
        print(
            f"{verdict}: {checkpoint.name} weights, KV {kv_format}, index {index_format}: "
            f"{len(errors)} rows of logits, relative error {middle:.4f} median, "
            f"{float(errors[int(0.99 * len(errors))]):.4f} at 99%, {float(errors[-1]):.4f} most; "
            f"argmax differs in {int(differ.sum())}, at margins up to "
            f"{float(margins.max()) if len(margins) else 0.0:.3f}",
            flush=True,
        )


def teacher_forced(model: Transformer, kv_format: str, index_format: str, seed: int) -> Tensor:
    """fp32 [rows, vocab_size] on the CPU: logits of the last rows of a chunked prefill and of a few
    decode steps, with pages in an order of `seed` among pages of NaN."""
    device = model.weights.embedding.device
    layout = RowLayout.of(
        model.spec, cache_format(kv_format, BF16), cache_format(index_format, BF16)
    )
    storage = PageStorage(layout, 40, None, device)
    storage.rows.fill_(0xFF)
    blocks = [-(-(length + FORCED) // BLOCK_TOKENS) for length in PROMPTS]
    pages = random.Random(seed).sample(range(1, storage.num_pages), sum(blocks))
    tables = [pages[: blocks[0]], pages[blocks[0] :]]
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(256, (n + FORCED,), generator=generator) for n in PROMPTS]
    cut = PROMPTS[0] * 3 // 4
    chunks = [((0, cut), (0, PROMPTS[1])), ((cut, PROMPTS[0]), (PROMPTS[1], PROMPTS[1]))]
    chunks += [tuple((n + i, n + i + 1) for n in PROMPTS) for i in range(FORCED)]  # type: ignore[misc]
    logits = []
    for chunk in chunks:
        spans = [(r, *span) for r, span in enumerate(chunk) if span[1] > span[0]]
        batch = Batch.of(
            [first for _, first, _ in spans],
            [last - first for _, first, last in spans],
            [tables[r] for r, _, _ in spans],
        )
        ids = torch.cat([texts[r][first:last] for r, first, last in spans])
        rows = torch.arange(max(0, len(ids) - 64), len(ids))
        with torch.inference_mode():
            given = (ids.to(device), batch.to(device), storage.layers, rows.to(device))
            logits.append(model.forward(*given).cpu())
    return torch.cat(logits)


def greedy(checkpoint: Path, backend: str, device: str) -> None:
    """Whole requests through the engine; bf16 may part ways at a near-tie, and stays apart then."""
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (1, 127, 128, 129, 300, 700, 900)]
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    answers = []
    for place, table in (("cpu", "cpu"), (device, backend)):
        llm = LLM(
            str(checkpoint), progress=False, device=place, backend=table, dtype="bfloat16",
            num_pages=64, max_step_tokens=256,
        )  # fmt: skip
        answers.append([c.token_ids for c in llm.generate(prompts, params)])
    equal = [
        next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
        for pair in zip(*answers, strict=True)
    ]
    print(f"greedy tokens equal to the CPU's before the first that differs, of 32: {equal}")


@dataclass
class Events:
    """Pairs of events on the device, by part."""

    pairs: list[tuple[str, torch.cuda.Event, torch.cuda.Event]]

    def around(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = function(*args)
        end.record()
        self.pairs.append((part, start, end))
        return result

    def take(self) -> dict[str, float]:
        """Seconds of each part; what lies between parts apart."""
        torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for part, start, end in self.pairs:
            seconds[part] = seconds.get(part, 0.0) + start.elapsed_time(end) / 1e3
        self.pairs.clear()
        seconds[BETWEEN] = seconds[WHOLE] - sum(s for p, s in seconds.items() if p != WHOLE)
        return seconds


def watched(model: Transformer, events: Events) -> Transformer:
    """The same model, its ops between events."""
    weights: ModelWeights = model.weights

    def timed(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            part = HEAD if op == "linear" and args[1] is weights.head else PARTS[op]
            return events.around(part, function, *args)

        return call

    table: Kernels = model.kernels
    names = (f.name for f in fields(table) if f.name != "backend")
    ops: dict[str, Any] = {op: timed(op, getattr(table, op)) for op in names}
    return Transformer(model.spec, weights, replace(table, **ops))


def steps(out: Path, commit_name: str, warm: bool) -> None:
    """Decode steps and a prefill chunk over random weights and a random cache."""
    config = EngineConfig.from_options(
        {
            "device": "cuda",
            "dtype": "bfloat16",
            "kv_format": "nvfp4",
            "index_format": "nvfp4",
            "num_pages": max(BATCHES) * (CONTEXT // BLOCK_TOKENS) + 1,
            "max_step_tokens": CHUNK,
            "prefix_caching": False,
        }
    )
    engine = build_engine(MODEL, config, random=True, num_layers=LAYERS, progress=False)
    # Bytes whose every nibble is a code and whose every byte is a scale near one.
    engine.runner.storage.rows.random_(0x28, 0x40)
    shapes = [(DECODE, requests, 1) for requests in BATCHES] + [(PREFILL, 1, CHUNK)]
    for what, requests, rows in shapes:
        name = f"{what}, {requests} x {CONTEXT} tokens, {requests * rows} rows"
        try:
            step(engine, what, requests, rows, name, out, commit_name, warm)
        except Exception as error:
            print(f"FAILED: {name}: {type(error).__name__}: {error}", flush=True)


def step(
    engine: Engine,
    what: str,
    requests: int,
    rows: int,
    name: str,
    out: Path,
    commit_name: str,
    warm: bool,
) -> None:
    """Time one kind of step, eagerly by part; a decode step also as replays of a CUDA graph."""
    model, storage = engine.runner.model, engine.runner.storage
    device = storage.rows.device
    blocks = CONTEXT // BLOCK_TOKENS
    pages = random.Random(0).sample(range(1, storage.num_pages), requests * blocks)
    tables = [pages[r * blocks : (r + 1) * blocks] for r in range(requests)]
    batch = Batch.of([CONTEXT - rows] * requests, [rows] * requests, tables).to(device)
    ids = torch.randint(model.spec.vocab_size, (requests * rows,), device=device)
    last = torch.arange(requests, device=device) * rows + rows - 1
    asked = [SampleRow(seed=0, index=0, temperature=0.0)] * requests
    events = Events([])
    timed = watched(model, events)

    def run(on: Transformer) -> Tensor:
        logits = on.forward(ids, batch, storage.layers, last)
        return on.kernels.sample(logits, asked).ids

    seconds = []
    with torch.inference_mode():
        run(model)
        torch.cuda.synchronize()
        for _ in range(1 if warm else SAMPLES):
            torch.cuda._sleep(PAUSE_CYCLES)
            events.around(WHOLE, run, timed)
            seconds.append(events.take())
        replays = [] if what == PREFILL else replayed(lambda: run(model), 1 if warm else SAMPLES)
    found = Steps(what, Shape(requests, CONTEXT), requests * rows, seconds)
    say = {"cut": f"the last {LAYERS} layers", "weights": "random", "timing": "device events"}
    records = step_records(engine, MODEL, found, f"{name} {time.time_ns()}", say)
    if replays:
        found = replace(found, seconds=[{WHOLE: s} for s in replays])
        say = {**say, "timing": "CUDA graph replay"}
        records += step_records(engine, MODEL, found, f"{name} graph {time.time_ns()}", say)
    show(name, records)
    if not warm:
        toolkit = {"cuda": str(torch.version.cuda)}
        conditions = {"cache_state": "random K, V and index keys in every page"}
        append(
            out,
            [
                replace(
                    record,
                    software={**record.software, **toolkit},
                    conditions={**record.conditions, **conditions},
                    commit=commit_name,
                )
                for record in records
            ],
        )


def replayed(run: Callable[[], Any], samples: int) -> list[float]:
    """Seconds of replays of one call, captured; empty, with the reason, if it cannot be."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        print(f"FAILED: no CUDA graph: {error}", flush=True)
        return []
    seconds = []
    for _ in range(samples + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds[1:]


def show(name: str, records: Sequence[Record]) -> None:
    """Medians, in microseconds: the step, its parts, and what a layer takes of it."""
    print(f"{name}:")
    medians: dict[str, float] = {}
    for record in records:
        part, timing = record.workload["part"], record.workload["timing"]
        us = median(record.samples) * 1e3
        medians.setdefault(part, us)
        print(f"  {part:32} {us:10.1f} us  {timing}")
    layers = medians[WHOLE] - medians[HEAD] - medians[PARTS["sample"]]
    print(f"  {'a layer':32} {layers / LAYERS:10.1f} us", flush=True)


if __name__ == "__main__":
    main()
