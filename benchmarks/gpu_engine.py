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
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from winnow.bench.conformance import KERNEL_OPS, conformance, render
from winnow.bench.floors import measured_rates, step_table
from winnow.bench.machine import commit
from winnow.bench.record import append
from winnow.bench.step import Shape, run_on_device, step_records
from winnow.config import EngineConfig, SamplingParams
from winnow.engine.build import build_engine
from winnow.engine.engine import Engine
from winnow.engine.llm import LLM
from winnow.engine.storage import PageStorage
from winnow.model.checkpoint import convert, load_checkpoint, make_tiny, read_spec
from winnow.model.transformer import Transformer
from winnow.ops.batch import Batch
from winnow.ops.table import kernels, why_not
from winnow.spec.formats import BF16, cache_format
from winnow.spec.model import BLOCK_TOKENS
from winnow.spec.page import RowLayout

BACKENDS = ("cuda", "hopper")
TIMED = "steps"
TIMED_SECONDS = 60
"""Kept for the timed part, which runs last."""

MODEL, LAYERS, SAMPLES = "minimax-m3.1-flash", 12, 10
CHUNK, PREFILLS = 8192, (131_072,)
DECODES = ((1, 8192), (8, 8192), (64, 65_536))
WALLS = ((1, 8192), (64, 1024))
"""Requests and tokens of each."""

FORMATS = (("model", "model"), ("fp8", "fp8"), ("nvfp4", "nvfp4"))
WEIGHTS = (("nvfp4", "mxfp8"), ("nvfp4", "keep"), ("keep", "mxfp8"))
"""Formats of experts and of the other products, beside bf16 throughout."""
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
    parser.add_argument("--backend", help="of the timed steps; default: the GPU's own")
    args = parser.parse_args()
    if args.part is not None:
        run_part(args.part, Path(args.out), args.commit, args.warm, args.backend)
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


def run_part(part: str, out: Path, commit_name: str, warm: bool, own: str | None) -> None:
    match part.split():
        case ["conformance", backend, op]:
            print(render(conformance(backend, (op,))))
        case ["tokens", backend]:
            if not tokens(backend, "cuda"):
                raise SystemExit(1)
        case ["steps"]:
            steps(out, commit_name, warm, own)
        case _:
            raise SystemExit(f"no part {part!r}")


def tokens(backend: str, device: str) -> bool:
    """A tiny model's logits and greedy tokens against those of the CPU backend, both in bf16;
    whether the logits are near enough."""
    with tempfile.TemporaryDirectory() as home:
        plain = Path(home) / "bf16"
        make_tiny(plain)
        checkpoints = [plain]
        for experts, linear in WEIGHTS:
            checkpoints.append(Path(home) / f"experts {experts}, linears {linear}")
            convert(plain, checkpoints[-1], experts, linear, progress=False)
        fine = [forced(checkpoint, backend, device) for checkpoint in checkpoints]
        greedy(plain, backend, device)
    return all(fine)


def forced(checkpoint: Path, backend: str, device: str) -> bool:
    """Logits of the same tokens on both sides, in pages of another order on each."""
    fine = True
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
        near = middle <= MEDIAN_ERROR and bool(got.isfinite().all())
        fine &= near
        print(
            f"{'ok' if near else 'FAILED'}: {checkpoint.name}, KV {kv_format}, index "
            f"{index_format}: {len(errors)} rows of logits, relative error {middle:.4f} median, "
            f"{float(errors[int(0.99 * len(errors))]):.4f} at 99%, {float(errors[-1]):.4f} most; "
            f"argmax differs in {int(differ.sum())}, at margins up to "
            f"{float(margins.max()) if len(margins) else 0.0:.3f}",
            flush=True,
        )
    return fine


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


def steps(out: Path, commit_name: str, warm: bool, backend: str | None) -> None:
    """Decode steps and a prefill chunk over random weights and a random cache, by part."""
    begun = time.monotonic()
    engine = flash(CHUNK, max(n * c for n, c in DECODES), backend)
    built_s = time.monotonic() - begun
    rates = measured_rates()
    print(
        f"{LAYERS} layers built in {built_s:.1f} s; reads {rates.read / 1e12:.2f} TB/s, multiplies "
        f"{rates.products / 1e12:.0f} TFLOP/s in bf16"
    )
    shapes = [Shape(*shape) for shape in DECODES]
    say = {"cut": f"the last {LAYERS} layers", "weights": "random"}
    for measured in run_on_device(engine, shapes, PREFILLS, 1 if warm else SAMPLES):
        print(step_table(engine, measured, rates), flush=True)
        run = str(time.time_ns())
        records = [
            replace(record, commit=commit_name, software={**record.software, **toolkit()})
            for found in measured
            for record in step_records(engine, MODEL, found, f"{run} {found.timing}", say)
        ]
        if not warm:
            append(out, records)
    for requests, tokens in WALLS:
        wall(engine, requests, tokens, 8 if warm else 48)


def flash(chunk: int, tokens: int, backend: str | None) -> Engine:
    """The last layers of M3.1-Flash with random weights and room for as many tokens."""
    config = EngineConfig.from_options(
        {
            "device": "cuda",
            "backend": backend,
            "dtype": "bfloat16",
            "kv_format": "nvfp4",
            "index_format": "nvfp4",
            "num_pages": tokens // BLOCK_TOKENS + 1025,
            "max_step_tokens": chunk,
            "max_running": 64,
            "prefix_caching": False,
        }
    )
    return build_engine(MODEL, config, random=True, num_layers=LAYERS, progress=False)


def wall(engine: Engine, requests: int, tokens: int, steps: int) -> None:
    """Whole decode steps by the host's clock, scheduling and text included: with the next step
    begun before this one's tokens are known, and without."""
    runner = engine.runner
    for go_ahead in (True, False):
        guess = runner._guess
        if not go_ahead:
            runner._guess = lambda *_: None  # type: ignore[method-assign]
        rng = random.Random(tokens)
        params = SamplingParams(max_tokens=steps + 40, temperature=0.0, ignore_eos=True)
        for r in range(requests):
            prompt = [rng.randrange(engine.spec.vocab_size) for _ in range(tokens)]
            engine.add(f"wall-{r}", prompt, params)
        while len(engine.step()) < requests:
            pass
        for _ in range(4):
            engine.step()
        begun = [time.perf_counter()]
        for _ in range(steps):
            engine.step()
            begun.append(time.perf_counter())
        each = sorted(b - a for a, b in pairwise(begun))
        for r in range(requests):
            engine.abort(f"wall-{r}")
        runner.drop_ahead()
        runner._guess = guess  # type: ignore[method-assign]
        print(
            f"engine steps of {requests} x {tokens} tokens, the next one begun "
            f"{'early' if go_ahead else 'after the tokens'}: {each[len(each) // 2] * 1e6:.0f} us "
            f"median, {(begun[-1] - begun[0]) / steps * 1e6:.0f} mean",
            flush=True,
        )


def toolkit() -> dict[str, str]:
    return {"cuda": str(torch.version.cuda)}


if __name__ == "__main__":
    main()
