"""Tokens on a GPU against the CPU engine's, and replayed steps against those computed as they are.

Greedy, in fp32 and bf16, over small checkpoints. A token may differ where the two largest logits
are close. It may also follow a choice of experts or of blocks that fell otherwise at a near tie, in
its own row or in one that its row attends to: then logits differ by more than rounding. So both
engines' choices are noted, row by row and layer by layer, and compared: the first ones that differ,
with no other before them in their row's past, must be near ties, and tokens with no such choice
before them must differ by rounding alone.

Rows of a GPU's products may be rounded otherwise in a batch of another size, so replays are
compared at sizes that need no padding.

    python benchmarks/gpu_tokens.py [--prompts N] [--tokens N] [--backend NAME]
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from winnow.config import SamplingParams
from winnow.engine.llm import LLM
from winnow.model.checkpoint import convert, make_tiny
from winnow.ops.batch import Batch
from winnow.ops.codec import reference as codec
from winnow.ops.moe.reference import choose
from winnow.ops.paged import Paged, read
from winnow.ops.weights import MoeWeights
from winnow.spec.embedded import DEMO
from winnow.spec.model import BLOCK_TOKENS, ModelSpec

FORMATS = ("model", "fp8", "nvfp4")
CHECKPOINTS = ("tiny", "tiny-whole", DEMO)
WITHOUT_CHOICES = {"num_experts": 4, "experts_per_token": 4, "topk_blocks": 8}
"""Of the tiny model: all experts and, of these prompts, all blocks are taken."""
REPLAYED = (1, 3, 8)
"""Requests at once, all of them sizes that are captured."""
CLOSE = {"float32": 1e-4, "bfloat16": 0.03}
"""Leads of a token's logit, over the root mean square of its row's, that rounding may turn."""
TIES = {"float32": 1e-5, "bfloat16": 0.02}
"""Leads of a choice that rounding may turn: of router scores, which are from 0 to 1, and of block
scores, as a share of the score."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--only", choices=("cpu", "replays"), help="one half of it")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, help="one, against the CPU")
    parser.add_argument("--weights", choices=("bf16", "nvfp4"), help="of the replays, one format")
    parser.add_argument("--kv", choices=FORMATS, help="of the replays, one format")
    parser.add_argument("--backend", help="default: the GPU's own")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        plain, quantised = Path(home) / "bf16", Path(home) / "nvfp4"
        make_tiny(plain)
        convert(plain, quantised, progress=False)
        make_tiny(Path(home) / "whole", **WITHOUT_CHOICES)
        places = (str(plain), str(Path(home) / "whole"), DEMO)
        if args.only != "replays":
            for name, place in zip(CHECKPOINTS, places, strict=True):
                if args.checkpoint in (None, name):
                    against_cpu(name, place, args.prompts, args.tokens, args.backend)
        if args.only != "cpu":
            for checkpoint in (plain, quantised):
                for kv in FORMATS:
                    if args.weights in (None, checkpoint.name) and args.kv in (None, kv):
                        for index in FORMATS:
                            replays(checkpoint, kv, index, args.backend)


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


@dataclass
class Noted:
    """What one engine computed for one request, by position in its sequence.

    `tokens` are its answer; `logits` fp32 [vocab_size] of each token. `choices` int64 [*] of each
    (position, depth), where depth counts the choices of a row: blocks, experts, layer by layer;
    `leads` is how far the last one taken was ahead of the first one left.
    """

    tokens: tuple[int, ...] = ()
    logits: list[Tensor] = field(default_factory=list)
    choices: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    leads: dict[tuple[int, int], float] = field(default_factory=dict)


class Watch:
    """Notes the choices and logits of an engine whose steps are computed as they are."""

    def __init__(self, llm: LLM) -> None:
        self.noted: dict[str, Noted] = {}
        self._rows: list[tuple[str, int]] = []
        self._depth = 0
        runner = llm.engine.runner
        inputs, logits, model = runner.inputs, runner.logits, runner.model
        self._kernels = model.kernels

        def noting_inputs(plan: Any, requests: Any) -> Any:
            self._rows = [
                (row.request_id, row.start + i) for row in plan.rows for i in range(row.count)
            ]
            self._depth = 0
            return inputs(plan, requests)

        def noting_logits(given: Any) -> Tensor:
            found = logits(given)
            for name, row in zip(given.sampled, found.cpu(), strict=True):
                self._of(name).logits.append(row)
            return found

        model.kernels = replace(model.kernels, moe=self._moe, select_blocks=self._select_blocks)
        runner.inputs = noting_inputs  # type: ignore[method-assign]
        runner.logits = noting_logits  # type: ignore[method-assign]

    def _of(self, name: str) -> Noted:
        return self.noted.setdefault(name, Noted())

    def _moe(self, x: Tensor, weights: MoeWeights, spec: ModelSpec) -> Tensor:
        products = x.double() @ weights.router.double().T
        chosen, _ = choose(products.float(), weights.router_bias, spec)
        ranked = (products.sigmoid() + weights.router_bias).sort(dim=1, descending=True).values
        last = spec.experts_per_token
        left = ranked[:, last] if last < spec.num_experts else -math.inf
        self._note(chosen.sort(dim=1).values, ranked[:, last - 1] - left)
        return self._kernels.moe(x, weights, spec)

    def _select_blocks(self, index_q: Tensor, index: Paged, batch: Batch, topk: int) -> Tensor:
        ids = self._kernels.select_blocks(index_q, index, batch, topk)
        self._note(ids.flatten(1).long(), block_leads(index_q, index, batch, topk))
        return ids

    def _note(self, choices: Tensor, leads: Tensor) -> None:
        for (name, position), taken, lead in zip(
            self._rows, choices.cpu(), leads.tolist(), strict=True
        ):
            noted = self._of(name)
            noted.choices[position, self._depth] = taken
            noted.leads[position, self._depth] = lead
        self._depth += 1


def block_leads(index_q: Tensor, index: Paged, batch: Batch, topk: int) -> Tensor:
    """fp64 [rows]: how far the last block taken leads the first one left, as a share of its score,
    the least of a row's heads; infinite where all are taken."""
    leads = torch.full((index_q.shape[0],), math.inf, dtype=torch.float64)
    past = (batch.positions // BLOCK_TOKENS).tolist()
    starts = batch.row_starts.tolist()
    for request, (first, end) in enumerate(pairwise(starts)):
        rows = [r for r in range(first, end) if past[r] >= topk]
        if not rows:
            continue
        blocks = past[rows[-1]]
        keys = read(codec, index, batch.block_tables[request, :blocks].cpu(), torch.float32)
        keys = keys.cpu().double().reshape(-1, index_q.shape[2])
        products = index_q[rows].cpu().double() @ keys.T
        scores = products.unflatten(2, (blocks, BLOCK_TOKENS)).amax(3)
        for r, own in zip(rows, scores, strict=True):
            ranked = own[:, : past[r]].sort(descending=True).values
            last, next_one = ranked[:, topk - 2], ranked[:, topk - 1]
            leads[r] = float(((last - next_one) / last.abs()).min())
    return leads


def noted_answers(llm: LLM, given: Sequence[list[int]], params: SamplingParams) -> list[Noted]:
    watch = Watch(llm)
    answers = llm.generate(given, params)
    found = [watch.noted[f"offline-{number}"] for number in range(len(given))]
    for noted, answer in zip(found, answers, strict=True):
        noted.tokens = answer.token_ids
    return found


def against_cpu(name: str, checkpoint: str, count: int, tokens: int, backend: str | None) -> None:
    """Greedy answers of the GPU and of the CPU, and for scale those of the CPU's two dtypes."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    on_cpu, on_device = {}, {}
    for dtype in CLOSE:
        begun = time.monotonic()
        cpu = LLM(checkpoint, progress=False, dtype=dtype, num_pages=1024, max_step_tokens=4096)
        given = prompts(count, cpu.engine.spec.vocab_size, 17)
        on_cpu[dtype] = noted_answers(cpu, given, params)
        cpu_s = time.monotonic() - begun
        on_device[dtype] = noted_answers(on_gpu(checkpoint, False, backend, dtype), given, params)
        captured = on_gpu(checkpoint, True, backend, dtype)
        replayed = [answer.token_ids for answer in captured.generate(given, params)]
        print(f"(CPU {cpu_s:.0f} s, all {time.monotonic() - begun:.0f} s)")
        unlike = sum(a != b.tokens for a, b in zip(replayed, on_device[dtype], strict=True))
        equal = sum(a == b.tokens for a, b in zip(replayed, on_cpu[dtype], strict=True))
        print(
            f"{name} in {dtype}: answers of replayed steps: {equal} of {count} are the CPU's; "
            f"{unlike} are not those of eager steps in other batches"
        )
        compare(f"{name} in {dtype}, GPU against CPU", on_cpu[dtype], on_device[dtype], dtype)
    title = f"{name}, for scale: the CPU in bf16 against itself in fp32"
    compare(title, on_cpu["float32"], on_cpu["bfloat16"], "bfloat16")


def compare(title: str, want: Sequence[Noted], got: Sequence[Noted], dtype: str) -> None:
    """Print where answers part, and what came before; then whether all of it is rounding."""
    lines: list[str] = []
    errors: dict[bool, list[float]] = {True: [], False: []}
    leads: dict[bool, list[float]] = {True: [], False: []}
    first: list[float] = []
    others, choices = 0, 0
    for number, (a, b) in enumerate(zip(want, got, strict=True)):
        pairs = list(zip(a.tokens, b.tokens, strict=True))
        place = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        compared = len(pairs) if place is None else place + 1
        length = 1 + max(position for position, _ in a.choices) - (len(pairs) - 1)
        turned, clean_until = turned_choices(a, b, length + compared - 1)
        choices += sum(position < length + compared - 1 for position, _ in a.choices)
        first += [a.leads[key] for key, is_first in turned.items() if is_first]
        others += sum(not is_first for is_first in turned.values())
        for i in range(compared):
            clean = length + i <= clean_until
            errors[clean].append(float((b.logits[i] - a.logits[i]).norm() / a.logits[i].norm()))
        if place is not None:
            best = a.logits[place].topk(2).values
            lead = float(best[0] - best[1]) / float(a.logits[place].square().mean().sqrt())
            clean = length + place <= clean_until
            leads[clean].append(lead)
            lines.append(
                f"  prompt {number}, {length} tokens: token {place}, lead {lead:.4f}, "
                + ("no choice" if clean else f"{len(turned)} choices")
                + " before it differ"
            )
    print("\n".join(lines))
    rounding = all(lead <= CLOSE[dtype] for lead in leads[True])
    ties = all(lead <= TIES[dtype] for lead in first)
    print(
        f"{'ok' if rounding and ties else 'FAILED'}: {title}: {len(want) - len(lines)} of "
        f"{len(want)} answers equal; {len(leads[True])} part with no other choice before, at leads "
        f"of {max(leads[True], default=0.0):.4f} of the row's root mean square at most, "
        f"{len(leads[False])} after one, at {max(leads[False], default=0.0):.4f}\n"
        f"    choices: {len(first) + others} of {choices} differ, {len(first)} of them with none "
        f"before, at leads of {max(first, default=0.0):.2e} at most\n"
        f"    logits, relative error of a row: {spread(errors[True])} with no other choice before, "
        f"{spread(errors[False])} after one",
        flush=True,
    )


def turned_choices(a: Noted, b: Noted, rows: int) -> tuple[dict[tuple[int, int], bool], int]:
    """The choices that differ in the first `rows` positions, each with whether none differs that it
    could follow from: one of less depth in its own row or a row before. And how many positions
    have no such choice in their row or before."""
    turned: dict[tuple[int, int], bool] = {}
    least, clean = math.inf, rows
    depths = 1 + max(depth for _, depth in a.choices)
    for position in range(rows):
        keys = [(position, depth) for depth in range(depths)]
        own = [key[1] for key in keys if not torch.equal(a.choices[key], b.choices[key])]
        if own:
            clean = min(clean, position)
        least = min([least, *own])
        turned.update({(position, d): d <= least for d in own})
    return turned, clean


def spread(values: Sequence[float]) -> str:
    if not values:
        return "no row"
    ranked = sorted(values)
    middle, most = ranked[len(ranked) // 2], ranked[-1]
    return f"{len(ranked)} rows, {middle:.1e} median, {most:.1e} most"


if __name__ == "__main__":
    main()
