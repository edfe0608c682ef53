"""Tokens on a GPU against the CPU engine's, and replayed steps against those computed as they are.

Greedy, in bf16, over small checkpoints. Where a token differs from the CPU's, the two largest
logits there must be close: each such place is listed with their difference. Rows of a GPU's
products may be rounded otherwise in a batch of another size, so replays are compared at sizes that
need no padding.

    python benchmarks/gpu_tokens.py [--prompts N] [--tokens N] [--backend NAME]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from winnow.config import SamplingParams
from winnow.engine.llm import LLM, Completion
from winnow.model.checkpoint import convert, make_tiny
from winnow.spec.embedded import DEMO

FORMATS = ("model", "fp8", "nvfp4")
REPLAYED = (1, 3, 8)
"""Requests at once, all of them sizes that are captured."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--only", choices=("cpu", "replays"), help="one half of it")
    parser.add_argument("--backend", help="default: the GPU's own")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        plain, quantised = Path(home) / "bf16", Path(home) / "nvfp4"
        make_tiny(plain)
        convert(plain, quantised)
        if args.only != "replays":
            for dtype in ("float32", "bfloat16"):
                for name in (str(plain), DEMO):
                    against_cpu(name, dtype, args.prompts, args.tokens, args.backend)
        if args.only != "cpu":
            replays(quantised, "nvfp4", "nvfp4", args.backend)
            for kv in FORMATS:
                for index in FORMATS:
                    replays(plain, kv, index, args.backend)


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


def replays(checkpoint: Path, kv: str, index: str, backend: str | None) -> None:
    """The same requests with captured steps and without, drawn and greedy."""
    formats = {"kv_format": kv, "index_format": index}
    eager, captured = (on_gpu(checkpoint, on, backend, **formats) for on in (False, True))
    unlike = 0
    for size in REPLAYED:
        given = prompts(size, eager.engine.spec.vocab_size, size)
        for options in ({"temperature": 0.0}, {}, {"top_k": 40, "top_p": 0.95}):
            params = [
                SamplingParams(max_tokens=40, seed=i, ignore_eos=True, **options)
                for i in range(size)
            ]
            want, got = (llm.generate(given, params) for llm in (eager, captured))
            unlike += sum(a.token_ids != b.token_ids for a, b in zip(want, got, strict=True))
    runner = captured.engine.runner
    print(
        f"{'ok' if not unlike else 'FAILED'}: {checkpoint.name} weights, KV {kv}, index {index}: "
        f"{unlike} of {3 * sum(REPLAYED)} answers differ between replayed and eager steps; "
        f"{runner.guesses} steps begun early, {runner.wasted} of them for nothing",
        flush=True,
    )


def against_cpu(checkpoint: str, dtype: str, count: int, tokens: int, backend: str | None) -> None:
    """Greedy answers of the GPU, and of the CPU with the lead of each token's logit."""
    gpu = on_gpu(checkpoint, True, backend, dtype)
    given = prompts(count, gpu.engine.spec.vocab_size, 17)
    got = gpu.generate(given, greedy(tokens))
    del gpu
    begun = time.monotonic()
    cpu = LLM(checkpoint, progress=False, dtype=dtype, num_pages=1024, max_step_tokens=4096)
    want = cpu.generate(given, greedy(tokens, logprobs=2))
    leads = [lead for pair in zip(want, got, strict=True) if (lead := parting(*pair)) is not None]
    for number, (a, b) in enumerate(zip(want, got, strict=True)):
        if (lead := parting(a, b)) is not None:
            place, margin = lead
            print(
                f"  prompt {number}, {len(given[number])} tokens: token {place}, lead {margin:.4f}"
            )
    largest = max((margin for _, margin in leads), default=0.0)
    print(
        f"{Path(checkpoint).name} in {dtype}: {count} prompts, {count - len(leads)} equal, "
        f"{len(leads)} differing, largest lead at a first difference {largest:.4f} "
        f"(CPU took {time.monotonic() - begun:.0f} s)",
        flush=True,
    )


def greedy(tokens: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs)


def parting(want: Completion, got: Completion) -> tuple[int, float] | None:
    """Where two answers part, and by how much the first one's token led there."""
    pairs: Sequence[tuple[int, int]] = list(zip(want.token_ids, got.token_ids, strict=True))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return None
    (_, first), (_, second) = want.logprobs[place].top[:2]
    return place, first - second


if __name__ == "__main__":
    main()
