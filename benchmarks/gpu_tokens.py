"""Tokens on a GPU against the CPU engine's, and replayed steps against those computed as they are.

Greedy, in fp32 and bf16, over small checkpoints. A token may differ where the two largest logits
are close. It may also follow a choice of experts or of blocks that fell otherwise at a near tie, in
its own row or in one that its row attends to: then logits differ by more than rounding. So both
engines' choices are noted, row by row and layer by layer, and compared: the first ones that differ,
with no other before them in their row's past, must be near ties, and tokens with no such choice
before them must differ by rounding alone.

How close is close is measured, not set: by what the step from fp32 to bf16 does on the CPU alone.
It answers the same prompts in both. What is looked at is the lead of a row's first logit over its
second, in units of the row's root mean square, over all rows whose tokens and choices so far are
the same in both; the same over the rows with the same tokens after another choice; and the lead of
a choice of experts or of blocks, where no choice that it follows from differs. The most that each
of the four is another one in bf16, times the square root of 2, is the tolerance: two computations
in bf16 differ from each other by that much more than one differs from fp32, if their roundings have
nothing in common. They have little: a sum in another order turns the rounding of some values, these
turn more, and a few operations later two engines that round at the same places differ by about as
much as either differs from fp32. In fp32, where nothing wider was computed, the tolerances are 100
times the relative error of a row's logits, about 1e-6.

After another choice logits differ by so much that the tolerance shows little: there
benchmarks/gpu_same_choices.py is the check, which gives the CPU the GPU's choices.

The CPU's answers need no GPU: `--write-cpu` leaves them in a file, with the processor's name, and
`--cpu-answers` takes them from there. They may be other ones there than here in bf16, whose
products are torch's and the processor's.

Rows of a GPU's products may be rounded otherwise in a batch of another size, so replays are
compared at sizes that need no padding.

    python benchmarks/gpu_tokens.py [--prompts N] [--tokens N] [--backend NAME]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from gpu_notes import Answers, load, machine, noted_answers, save
from gpu_parting import FP32, Comparison

from winnow.config import SamplingParams
from winnow.engine.llm import LLM
from winnow.engine.shapes import StepShape
from winnow.model.checkpoint import convert, make_tiny
from winnow.spec.embedded import DEMO

FORMATS = ("model", "fp8", "nvfp4")
CHECKPOINTS = ("tiny", "tiny-whole", DEMO)
WITHOUT_CHOICES = {"num_experts": 4, "experts_per_token": 4, "topk_blocks": 8}
"""Of the tiny model: all experts and, of these prompts, all blocks are taken."""
DTYPES = ("float32", "bfloat16")
REPLAYED = (1, 3, 8)
"""Requests at once, all of them sizes that are captured."""
LARGER = (16, 64)
"""The same, of one format for K, V and index keys; other kernels serve so many rows."""
TOKENS = 40
"""Of an answer that is compared with a replayed one."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--only", choices=("cpu", "replays"), help="one half of it")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, help="one, against the CPU")
    parser.add_argument("--dtype", choices=DTYPES, help="one, against the CPU")
    parser.add_argument("--write-cpu", type=Path, help="only the CPU's answers, into this file")
    parser.add_argument("--cpu-answers", type=Path, help="a file that --write-cpu wrote")
    parser.add_argument("--weights", choices=("bf16", "nvfp4"), help="of the replays, one format")
    parser.add_argument("--kv", choices=FORMATS, help="of the replays, one format")
    parser.add_argument("--index", choices=FORMATS, help="of the replays, one format")
    parser.add_argument("--backend", help="default: the GPU's own")
    args = parser.parse_args()
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        if args.only != "replays":
            names = [name for name in CHECKPOINTS if args.checkpoint in (None, name)]
            fine = tokens_of_both(args, {name: checkpoint(name, home) for name in names})
        if args.only != "cpu" and args.write_cpu is None:
            make_tiny(home / "bf16")
            convert(home / "bf16", home / "nvfp4", progress=False)
            for weights in ("bf16", "nvfp4"):
                for kv in FORMATS:
                    if args.weights in (None, weights) and args.kv in (None, kv):
                        for index in FORMATS:
                            if args.index in (None, index):
                                fine &= replays(home / weights, kv, index, args.backend)
    if not fine:
        raise SystemExit(1)


def checkpoint(name: str, home: Path) -> str:
    """What an engine opens for one of CHECKPOINTS."""
    if name == DEMO:
        return name
    make_tiny(home / name, **(WITHOUT_CHOICES if name == "tiny-whole" else {}))
    return str(home / name)


def tokens_of_both(args: argparse.Namespace, places: dict[str, str]) -> bool:
    """Whether what was compared differs by rounding alone."""
    asked = (args.prompts, args.tokens)
    if args.write_cpu is not None:
        save(
            args.write_cpu, {n: on_cpu(n, place, *asked) for n, place in places.items()}, machine()
        )
        return True
    fine = True
    earlier, where = ({}, machine()) if args.cpu_answers is None else load(args.cpu_answers)
    for name, place in places.items():
        answers = on_cpu(name, place, *asked) if args.cpu_answers is None else earlier[name]
        print(f"{name}: the CPU's answers were computed on {where}")
        fine &= against_cpu(name, place, answers, *asked, args.dtype, args.backend)
    return fine


def prompts(count: int, vocab: int, seed: int) -> list[list[int]]:
    """Of all lengths up to a few blocks beyond what selection can take whole."""
    rng = random.Random(seed)
    lengths = [rng.choice((rng.randrange(1, 140), rng.randrange(1, 700))) for _ in range(count)]
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def on_gpu(
    checkpoint: Path | str, graphs: bool, backend: str | None, dtype: str = "bfloat16", **more: str
) -> LLM:
    return LLM(
        str(checkpoint), progress=False, device="cuda", backend=backend, dtype=dtype,
        num_pages=1024, max_step_tokens=512, max_running=64, cuda_graphs=graphs, **more,
    )  # fmt: skip


def replays(checkpoint: Path, kv: str, index: str, backend: str | None) -> bool:
    """The same requests with captured steps and without, drawn and greedy; whether their answers
    are the same, and steps were replayed."""
    formats = {"kv_format": kv, "index_format": index}
    eager, captured = (on_gpu(checkpoint, on, backend, **formats) for on in (False, True))
    steps = counted_replays(captured)
    unlike, sizes = 0, REPLAYED + (LARGER if kv == index else ())
    short = []
    for size in sizes:
        make = prompts if size in REPLAYED else prompts_that_begin_together
        given = make(size, eager.engine.spec.vocab_size, size)
        if size in LARGER:
            for llm in (eager, captured):
                llm.generate(given, greedy(1))
        before = steps[size]
        ways = ({"temperature": 0.0}, {}, {"top_k": 40, "top_p": 0.95})
        for options in ways:
            params = [
                SamplingParams(max_tokens=TOKENS, seed=i, ignore_eos=True, **options)
                for i in range(size)
            ]
            want, got = (llm.generate(given, params) for llm in (eager, captured))
            unlike += sum(a.token_ids != b.token_ids for a, b in zip(want, got, strict=True))
        all_at_once = len(ways) * (TOKENS - 1)
        if steps[size] - before < (1 if size in REPLAYED else all_at_once):
            short.append(size)
    runner = captured.engine.runner
    print(
        f"{'ok' if not unlike and not short else 'FAILED'}: {checkpoint.name} weights, KV {kv}, "
        f"index {index}: {unlike} of {3 * sum(sizes)} answers differ between replayed and eager "
        f"steps; replayed of {', '.join(f'{n}: {steps[n]}' for n in sizes)} requests"
        f"{f', too few of {short}' if short else ''}; "
        f"{runner.guesses} steps begun early, {runner.wasted} of them for nothing",
        flush=True,
    )
    return not unlike and not short


def prompts_that_begin_together(count: int, vocab: int, seed: int) -> list[list[int]]:
    """Of whole blocks and a few tokens: once the blocks are cached, the rest of all of them fits
    one step. So all answers begin in one step and end in one, and no step has a number of requests
    between captured sizes, which a replay would pad and an eager step would not."""
    rng = random.Random(seed)
    lengths = [128 * rng.randrange(1, 6) + rng.randrange(1, 8) for _ in range(count)]
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def counted_replays(llm: LLM) -> Counter[int]:
    """Replayed steps by their number of requests, counted from now on."""
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    counts: Counter[int] = Counter()
    forward = graphs.forward

    def counted(shape: StepShape) -> None:
        counts[shape.requests] += 1
        forward(shape)

    graphs.forward = counted
    return counts


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def on_cpu(name: str, checkpoint: str, count: int, tokens: int) -> Answers:
    """Greedy answers of the CPU in both dtypes."""
    found = {}
    for dtype in DTYPES:
        begun = time.monotonic()
        llm = LLM(checkpoint, progress=False, dtype=dtype, num_pages=1024, max_step_tokens=4096)
        given = prompts(count, llm.engine.spec.vocab_size, 17)
        found[dtype] = noted_answers(llm, given, greedy(tokens))
        print(f"({name} in {dtype} on the CPU: {time.monotonic() - begun:.0f} s)", flush=True)
    return found


def against_cpu(
    name: str,
    checkpoint: str,
    cpu: Answers,
    count: int,
    tokens: int,
    only: str | None,
    backend: str | None,
) -> bool:
    """Greedy answers of the GPU and of the CPU, and for scale those of the CPU's two dtypes;
    whether the former differ by rounding alone."""
    fine = True
    scale = Comparison(cpu["float32"], cpu["bfloat16"])
    bounds = {"float32": FP32, "bfloat16": scale.bounds()}
    scale.report(f"{name}, for scale: the CPU in bf16 against itself in fp32", None)
    for dtype in DTYPES if only is None else (only,):
        begun = time.monotonic()
        eager = on_gpu(checkpoint, False, backend, dtype)
        given = prompts(count, eager.engine.spec.vocab_size, 17)
        asked = [(len(prompt), tokens) for prompt in given]
        assert asked == [(int(one.length), len(one.tokens)) for one in cpu[dtype]], "other prompts"
        got = noted_answers(eager, given, greedy(tokens))
        captured = on_gpu(checkpoint, True, backend, dtype).generate(given, greedy(tokens))
        replayed = [answer.token_ids for answer in captured]
        unlike, equal = (
            sum(a != tuple(b.tokens.tolist()) for a, b in zip(replayed, own, strict=True))
            for own in (got, cpu[dtype])
        )
        print(f"({name} in {dtype} on the GPU: {time.monotonic() - begun:.0f} s)")
        print(
            f"{name} in {dtype}: answers of replayed steps: {count - equal} of {count} are the "
            f"CPU's; {unlike} are not those of eager steps in other batches"
        )
        title = f"{name} in {dtype}, GPU against CPU"
        fine &= Comparison(cpu[dtype], got).report(title, bounds[dtype])
        if dtype != "float32":
            title = f"{name}, for scale: the GPU in {dtype} against the CPU in fp32"
            Comparison(cpu["float32"], got).report(title, None)
    return fine


if __name__ == "__main__":
    main()
