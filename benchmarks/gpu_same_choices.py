"""A GPU's answers against the CPU's after the same choices: no row is left out, and what is chosen
at a near tie explains nothing away.

The GPU answers greedily in bf16, and its tokens, logits and choices of experts and of blocks are
noted. The CPU's engine then computes the same tokens, each answer behind its prompt, with every
choice forced to what the GPU took, in bf16 and in fp32. Then, row by row:

- a choice that would have fallen otherwise on the CPU must have been a near tie there;
- the row's logits must be the GPU's, relative error, within the format's tolerance;
- the CPU's largest logit must be the GPU's token, or be ahead of it by no more than the tolerance;
- and over all rows the median error against fp32 may be 1.1 times that of the CPU in bf16. A
  tolerance for the farthest row is too wide to see what is a little wrong everywhere; this is not.

How much is near is measured on the CPU alone, before any GPU is asked (`--measure`): the engine's
answers in bf16, against the same tokens after the same choices in fp32. The most that a row's
logits, the lead of its largest logit over the second, and the gap between what was taken and what
was left are other ones there, times the square root of 2, are the tolerances: two computations in
bf16 differ from each other by that much more than one differs from fp32, if their roundings have
nothing in common (docs/log.md has why they have little). BOUNDS are what it printed.

K, V and index keys that are stored in few bits are choices too: a code falls one way or the other.
So where state is quantised the CPU reads what the GPU stored, and what it would have stored itself
is compared with that, under tolerances of its own. These cases need both sides in one process.

    python benchmarks/gpu_same_choices.py --write FILE      # on the GPU
    python benchmarks/gpu_same_choices.py --against FILE    # on any CPU; with neither, both
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from gpu_agreement import Agreement, Bounds
from gpu_forced import Asked, Forced, forced
from gpu_notes import Answers, StoredPages, load, machine, noted_answers, save
from gpu_tokens import CHECKPOINTS, checkpoint, greedy, prompts

from winnow.engine.llm import LLM
from winnow.model.checkpoint import convert, read_spec
from winnow.spec.embedded import DEMO, checkpoint_path

COLUMNS = 512
"""Logits of a row that are compared, at most: all of the tiny model, every eighth of the demo's."""
STATES = ("model", "fp8", "nvfp4")
WEIGHTS = (("nvfp4", "mxfp8"), ("nvfp4", "keep"), ("keep", "mxfp8"))
"""Formats of experts and of the other products."""
LONG = (1100, 1900)
"""Tokens of the few prompts whose blocks the demo model cannot take whole."""
MANY, FEW, FEWER = 200, 40, 16
"""Prompts of a checkpoint as it is, with other weights, and with quantised state. Bounds are always
measured over MANY: the farthest of more rows is farther."""


@dataclass(frozen=True)
class Case:
    """A checkpoint, its weights in other formats or as they are, and the format of KV and index."""

    model: str
    weights: tuple[str, str] | None = None
    state: str = "model"

    @property
    def name(self) -> str:
        held = (
            "as stored" if self.weights is None else "experts {}, linears {}".format(*self.weights)
        )
        return f"{self.model}, {held}, state {self.state}"

    @property
    def given(self) -> bool:
        """Whether what is stored is given too: a code of few bits that falls otherwise is a choice
        as others are."""
        return self.state != "model"

    def prompts(self, vocab: int, share: float, many: bool) -> list[list[int]]:
        count = FEWER if self.given else MANY if self.weights is None else FEW
        count = max(1, round((MANY if many else count) * share))
        found = prompts(count, vocab, 17)
        if self.model == DEMO:
            rng = random.Random(count)
            lengths = [rng.randrange(*LONG) for _ in range(-(-count // 25))]
            found += [[rng.randrange(vocab) for _ in range(length)] for length in lengths]
        return found

    def place(self, home: Path) -> str:
        """What an engine opens; made where it is not there yet."""
        if self.model == DEMO:
            return DEMO
        if not (home / self.model).exists():
            checkpoint(self.model, home)
        if self.weights is None:
            return str(home / self.model)
        own = home / "-".join((self.model, *self.weights))
        if not own.exists():
            convert(home / self.model, own, *self.weights, progress=False)
        return str(own)

    def vocab(self, home: Path) -> int:
        return read_spec(checkpoint_path(self.place(home))).vocab_size

    def engine(self, home: Path, dtype: str, device: str, backend: str | None) -> LLM:
        return LLM(
            self.place(home), progress=False, dtype=dtype, device=device, backend=backend,
            kv_format=self.state, index_format=self.state, num_pages=1024, max_running=64,
            max_step_tokens=512, cuda_graphs=False, prefix_caching=False,
        )  # fmt: skip


CASES = tuple(
    [Case(name) for name in CHECKPOINTS]
    + [Case(name, None, state) for name in ("tiny", DEMO) for state in STATES[1:]]
    + [Case("tiny", weights, state) for weights in WEIGHTS for state in STATES]
)

BOUNDS = {
    "tiny, as stored, state model": Bounds(0.019, 0.072, 0.016, 0.039),
    "tiny-whole, as stored, state model": Bounds(0.019, 0.073, 0, 0),
    "demo, as stored, state model": Bounds(0.027, 0.073, 0.038, 0.017),
    "tiny, as stored, state fp8": Bounds(0.019, 0.076, 0.014, 0.029, 0.075, 0.019),
    "tiny, as stored, state nvfp4": Bounds(0.018, 0.066, 0.016, 0.033, 0.2, 0.043),
    "demo, as stored, state fp8": Bounds(0.018, 0.069, 0.035, 0.013, 0.1, 0.017),
    "demo, as stored, state nvfp4": Bounds(0.018, 0.053, 0.029, 0.014, 0.29, 0.033),
    "tiny, experts nvfp4, linears mxfp8, state model": Bounds(0.019, 0.07, 0.016, 0.034),
    "tiny, experts nvfp4, linears mxfp8, state fp8": Bounds(
        0.021, 0.077, 0.016, 0.026, 0.076, 0.019
    ),
    "tiny, experts nvfp4, linears mxfp8, state nvfp4": Bounds(
        0.019, 0.063, 0.017, 0.026, 0.2, 0.043
    ),
    "tiny, experts nvfp4, linears keep, state model": Bounds(0.02, 0.074, 0.017, 0.038),
    "tiny, experts nvfp4, linears keep, state fp8": Bounds(0.02, 0.06, 0.015, 0.026, 0.077, 0.019),
    "tiny, experts nvfp4, linears keep, state nvfp4": Bounds(
        0.018, 0.069, 0.017, 0.031, 0.19, 0.043
    ),
    "tiny, experts keep, linears mxfp8, state model": Bounds(0.021, 0.066, 0.018, 0.039),
    "tiny, experts keep, linears mxfp8, state fp8": Bounds(0.021, 0.06, 0.016, 0.026, 0.074, 0.019),
    "tiny, experts keep, linears mxfp8, state nvfp4": Bounds(
        0.018, 0.072, 0.016, 0.027, 0.19, 0.042
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, help="only a GPU's answers, into this file")
    parser.add_argument("--against", type=Path, help="a file that --write wrote")
    parser.add_argument("--measure", action="store_true", help="print BOUNDS, on a CPU alone")
    parser.add_argument("--case", action="append", help="only names that begin so")
    parser.add_argument("--share", type=float, default=1.0, help="of the prompts, for a trial")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--device", default="cuda", help="of the side that chooses")
    parser.add_argument("--dtype", default="bfloat16", help="of that side")
    parser.add_argument("--listed", type=int, default=6, help="choices of a kind that are printed")
    parser.add_argument("--backend", help="of that side; default: the device's own")
    args = parser.parse_args()
    wanted = tuple(args.case or [""])
    cases = [case for case in CASES if case.name.startswith(wanted)]
    assert cases, "no case of that name"
    if args.write is not None or args.against is not None:
        # What is stored would be most of the file.
        for case in [case for case in cases if case.given]:
            print(f"left out, as it is compared in one go: {case.name}")
            cases.remove(case)
    earlier, where = ({}, "here") if args.against is None else load(args.against)
    if args.against is not None:
        absent = [case.name for case in cases if case.name not in earlier]
        if absent and (args.case or len(absent) == len(cases)):
            raise SystemExit(f"{args.against} has no answers of {'; '.join(absent)}")
        cases = [case for case in cases if case.name in earlier]
    written: dict[str, Answers] = {}
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for case in cases:
            if args.measure:
                measure(case, home, args)
                continue
            if args.against is None:
                asked = answers(case, home, args)
            else:
                noted = earlier[case.name][args.dtype]
                given = case.prompts(case.vocab(home), args.share, False)
                asked = [Asked(prompt, one) for prompt, one in zip(given, noted, strict=True)]
                assert all(len(one.prompt) == one.noted.length for one in asked), "other prompts"
            if args.write is not None:
                written[case.name] = {args.dtype: [one.noted for one in asked]}
                device = torch.cuda.get_device_name() if args.device == "cuda" else machine()
                save(args.write, written, device)  # again and again: what is answered is kept
            else:
                print(f"{case.name}: answers of {where}, computed again on {machine()}")
                fine = compare(case, home, asked, args.listed) and fine
    if not fine:
        raise SystemExit(1)


def answers(case: Case, home: Path, args: argparse.Namespace) -> list[Asked]:
    """Of the side that chooses."""
    begun = time.monotonic()
    llm = case.engine(home, args.dtype, args.device, args.backend)
    given = case.prompts(llm.engine.spec.vocab_size, args.share, args.measure)
    pages = StoredPages(llm) if case.given else None
    noted = noted_answers(llm, given, greedy(args.tokens), COLUMNS)
    took = time.monotonic() - begun
    print(f"({case.name}: {len(given)} prompts on {args.device}: {took:.0f} s)", flush=True)
    return [
        Asked(prompt, one, None if pages is None else pages.of(f"offline-{number}"))
        for number, (prompt, one) in enumerate(zip(given, noted, strict=True))
    ]


def computed(case: Case, home: Path, dtype: str, asked: Sequence[Asked]) -> list[Forced]:
    """What the CPU's engine makes of these tokens and choices."""
    return forced(case.engine(home, dtype, "cpu", None), asked, COLUMNS)


def measure(case: Case, home: Path, args: argparse.Namespace) -> None:
    """Print a line of BOUNDS, and how many rows it is of and their median error."""
    args.device, args.dtype, args.backend = "cpu", "bfloat16", None
    asked = answers(case, home, args)
    wide = computed(case, home, "float32", asked)
    agreement = Agreement([one.noted for one in asked], wide)
    found = astuple(agreement.bounds())[: None if case.given else -2]
    values = ", ".join(f"{value:.2g}" for value in found)
    print(
        f'    "{case.name}": Bounds({values}),  # {len(agreement.errors)} rows, '
        f"{float(agreement.errors.median()):.2e} median",
        flush=True,
    )


def compare(case: Case, home: Path, asked: Sequence[Asked], listed: int) -> bool:
    begun = time.monotonic()
    narrow, wide = (computed(case, home, dtype, asked) for dtype in ("bfloat16", "float32"))
    agreement = Agreement([one.noted for one in asked], narrow)
    fine = agreement.report(case.name, BOUNDS[case.name], wide, listed)
    print(f"({time.monotonic() - begun:.0f} s)", flush=True)
    return fine


if __name__ == "__main__":
    main()
