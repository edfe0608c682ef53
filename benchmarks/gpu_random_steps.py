"""Random steps on a GPU: arrivals, prompts in chunks, decode, preemptions, prefix hits and
departures mixed, steps captured, under the scheduler's invariants and with an eye on memory.

    python benchmarks/gpu_random_steps.py [--steps N] [--seconds N] [--seed N] [--eager]

Under compute-sanitizer's memcheck, PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives every tensor an
allocation of its own, so that a read past its end is seen; nothing can be captured then.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from winnow.config import EngineConfig, SamplingParams
from winnow.engine.build import build_engine
from winnow.engine.engine import Engine
from winnow.model.checkpoint import convert, make_tiny

SETTLED = 0.3
"""Share of the steps after which memory must not grow: by then every shape was captured."""
LOOKS = 100
"""At memory, over all steps."""
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"top_k": 20, "top_p": 0.9},
    {"min_p": 0.05},
    {"presence_penalty": 0.5},
    {"logprobs": 2},
    {"min_tokens": 4, "ignore_eos": False},
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=90.0, help="stop after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="capture no steps")
    parser.add_argument("--backend", help="default: the GPU's own")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        plain, quantised = Path(home) / "bf16", Path(home) / "nvfp4"
        make_tiny(plain)
        convert(plain, quantised)
        config = EngineConfig(
            device="cuda", backend=args.backend, dtype="bfloat16",
            kv_format="nvfp4", index_format="nvfp4",
            num_pages=22, max_step_tokens=200, max_running=20, max_model_len=2048,
            cuda_graphs=not args.eager,
        )  # fmt: skip
        engine = build_engine(str(quantised), config, progress=False)
    walk(engine, args.steps, args.seconds, args.seed)


def walk(engine: Engine, steps: int, seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    ends: Counter[str] = Counter()
    prefix = [rng.randrange(256) for _ in range(300)]
    live: list[str] = []
    memory: list[tuple[int, int, int]] = []
    often = max(1, steps // LOOKS)
    begun, tokens = time.monotonic(), 0
    done = 0
    for step in range(steps):
        if len(live) < 30 and rng.random() < 0.12:
            length = rng.choice((rng.randrange(1, 40), rng.randrange(1, 300), rng.randrange(900)))
            shared = prefix[: rng.choice((0, 0, 128, 300))]
            prompt = [*shared, *(rng.randrange(256) for _ in range(length)), 1]
            kind = {"ignore_eos": True, **rng.choice(KINDS)}
            most = rng.choice((5, rng.randrange(5, 120), rng.randrange(5, 400)))
            engine.add(f"q{step}", prompt, SamplingParams(max_tokens=most, seed=step, **kind))
            live.append(f"q{step}")
        if live and rng.random() < 0.02:
            gone = rng.choice(live)
            assert engine.abort(gone)
            live.remove(gone)
            ends["abort"] += 1
        for output in engine.step():
            assert output.error is None, output.error
            tokens += len(output.token_ids)
            if output.finish_reason is not None:
                ends[output.finish_reason] += 1
                live.remove(output.request_id)
        engine.scheduler.check_invariants()
        done += 1
        if (step + 1) % often == 0:
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), free))
        if done % 1000 == 0:
            print(f"  {done} steps after {time.monotonic() - begun:.0f} s", flush=True)
        if time.monotonic() - begun > seconds:
            break
    for name in live:
        engine.abort(name)
    runner, stats = engine.runner, engine.stats()
    while engine.has_work:
        engine.step()
    assert engine.stats().pages_used == 0
    settled = memory[int(len(memory) * SETTLED) :]
    grown = [settled[-1][i] - settled[0][i] for i in range(3)]
    print(
        f"{done} steps in {time.monotonic() - begun:.0f} s, {tokens} tokens, "
        f"{dict(ends)}, {stats.preemptions} preemptions, {stats.prefix_hit_tokens} tokens found, "
        f"{runner.guesses} steps begun early, {runner.wasted} for nothing; since "
        f"{SETTLED:.0%} of the way: allocated {grown[0]:+d} B, reserved {grown[1]:+d} B, free "
        f"{grown[2]:+d} B of {settled[-1][2]}",
        flush=True,
    )


if __name__ == "__main__":
    main()
