"""`python -m train.evaluate`: what formats of the cache and selection cost, on held-out text.

For each way of serving the same weights: loss, recall at a distance, the share of dense
attention's mass that the selected blocks hold, and how far selections agree with those of full
precision. Writes JSON lines.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from train import quantise, tasks
from train.corpus import BUILD
from train.heldout import HeldOut, held_out, windows
from train.losses import block_mass
from train.mixture import Source
from train.model import DemoModel, Linear, Moe, State
from train.questions import Questions, documents
from train.run import open_trainer
from train.sample import ANSWER, Sample

_PROBED_ROWS = 128


@dataclass(frozen=True)
class Sizes:
    """How much is evaluated: a smoke test needs less than a record."""

    window: int = 16384
    windows: int = 24
    recall: tuple[int, ...] = (8192, 16384)
    documents: int = 100
    batch_tokens: int = 65536
    exercises: int = 400
    text_windows: int = 1000
    """Of each kind of text, at most, for bits per byte."""


SMALL = Sizes(window=512, windows=4, recall=(1536,), documents=3, batch_tokens=1536, exercises=8,
              text_windows=2)  # fmt: skip


def cells() -> dict[str, State]:
    """Ways of serving, by name; the first is full precision."""
    kinds = {
        f"kv {kv}, index {index}": State("sparse", kv, index, exact_scores=True)
        for kv in quantise.FORMATS
        for index in quantise.FORMATS
    }
    dense = {f"dense, kv {kv}": State("dense", kv) for kv in ("model", "nvfp4")}
    return kinds | dense | {"random selection": State("random", "model", "model")}


class Evaluation:
    """One model and the text to try it on."""

    def __init__(self, model: DemoModel, source: Source, sizes: Sizes) -> None:
        self.model, self.source, self.sizes = model, source, sizes
        self.device = model.embed_tokens.device
        self.text = held_out(source)
        self.windows = windows(self.text, sizes.window, sizes.windows)
        self.documents = {
            length: documents(source, length, sizes.documents, seed=1) for length in sizes.recall
        }
        self._reference: list[Tensor] | None = None

    def measures(self, first: State) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """The lines of a record, by name, and what measures each; `first` is full precision."""
        native = cells()["kv nvfp4, index nvfp4"]
        for name, state in cells().items():
            yield name, partial(self.cell, state)
        for name, state in (("model", first), ("nvfp4", native)):
            yield f"text and arithmetic, state in {name}", partial(self.texts, state)

    def texts(self, state: State) -> dict[str, Any]:
        return {"bits_per_byte": self.bits_per_byte(state), "arithmetic": self.arithmetic(state)}

    @torch.no_grad()
    def cell(self, state: State) -> dict[str, Any]:
        """All measures of one way of serving."""
        torch.manual_seed(0)
        record: dict[str, Any] = {"held_out_loss": self.loss(state)}
        for length, asked in self.documents.items():
            record[f"recall_{length}"] = self.recall(asked, state)
        record |= self.selections(state)
        return record

    @torch.no_grad()
    def loss(self, state: State) -> float:
        return round(float(self._losses(self.windows, state).double().mean()), 5)

    def recall(self, asked: list[Questions], state: State) -> dict[str, Any]:
        """Share of answers whose every token is the likeliest, in all, by style and by the
        quarter of the text that holds the fact."""
        results: list[tuple[str, float, bool]] = []
        best = self._best(np.stack([questions.ids for questions in asked]), state)
        for questions, row in zip(asked, best, strict=True):
            for one in questions.asked:
                right = row[one.start - 1 : one.stop - 1] == questions.ids[one.start : one.stop]
                results.append((questions.style, one.depth, bool(right.all())))
        return {
            "questions": len(results),
            "accuracy": _share([right for _, _, right in results]),
            "by_style": {style: _share([r for s, _, r in results if s == style])
                         for style in sorted({s for s, _, _ in results})},
            "by_depth": [_share([r for _, d, r in results if q / 4 <= d < (q + 1) / 4])
                         for q in range(4)],
        }  # fmt: skip

    @torch.no_grad()
    def selections(self, state: State) -> dict[str, float]:
        """Mass held and overlap, on rows of some windows that see more blocks than they select."""
        ids = torch.from_numpy(
            self.windows[:: max(1, len(self.windows) // 4)][:4, :-1].astype(np.int64)
        )
        topk = self.model.spec.topk_blocks
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(
            topk * 128, ids.shape[1], (len(ids), _PROBED_ROWS), generator=generator
        )
        rows = rows.to(self.device)
        held, chosen = [], []
        out = self.model(ids.to(self.device), state, probe=True)
        for probe in out.probes.values():
            if probe.selected is not None:
                _, groups, _, blocks = probe.selected.shape
                picked = probe.selected.gather(
                    2, rows[:, None, :, None].expand(-1, groups, -1, blocks)
                )
                held.append((block_mass(probe.q, probe.k, rows) * picked).sum(-1).mean())
                chosen.append(picked)
        if not chosen:
            return {}
        if self._reference is None:
            self._reference = chosen
        # The current block is in every selection and is not counted.
        both = [
            ((a & b).sum(-1) - 1).float().mean()
            for a, b in zip(chosen, self._reference, strict=True)
        ]
        return {"mass_held": round(float(torch.stack(held).mean()), 4),
                "overlap": round(float(torch.stack(both).mean()) / (topk - 1), 4)}  # fmt: skip

    @torch.no_grad()
    def bits_per_byte(self, state: State) -> dict[str, float]:
        """By kind of text and over all of it; every token is predicted once, from up to a window
        before it."""
        length = self.sizes.window
        rows = [self._rows(part) for part in self.text]
        losses = self._losses(np.concatenate(rows), state).double()
        bits: dict[str, float] = {}
        sizes: dict[str, float] = {}
        for part, own, found in zip(
            self.text, rows, losses.split([len(r) for r in rows]), strict=True
        ):
            count = min(len(part.ids) - 1, len(own) * length)
            bits[part.kind] = float(found.flatten()[:count].sum()) / math.log(2)
            # All of a kind's bytes, or the share of its tokens that was read.
            sizes[part.kind] = part.num_bytes * count / (len(part.ids) - 1)
        result = {kind: round(bits[kind] / sizes[kind], 4) for kind in bits}
        return result | {"all": round(sum(bits.values()) / sum(sizes.values()), 4)}

    def _rows(self, part: HeldOut) -> np.ndarray:
        """Windows [n, window + 1] over a kind of text, the last filled with end tokens."""
        length = self.sizes.window
        count = min(self.sizes.text_windows, -(-(len(part.ids) - 1) // length))
        padded = np.full(count * length + 1, self.source.end_id, dtype=np.uint16)
        padded[: len(part.ids)] = part.ids[: len(padded)]
        return np.stack([padded[i * length : (i + 1) * length + 1] for i in range(count)])

    @torch.no_grad()
    def arithmetic(self, state: State) -> dict[str, float]:
        """Share of exercises with every token of steps and answer the likeliest, by the sign."""
        rng = Random("arithmetic")
        made = [tasks.exercise(rng) for _ in range(self.sizes.exercises)]
        length = 384
        right: dict[str, list[bool]] = {}
        rows, marks = [], []
        for expression, steps, value in made:
            sample = Sample().add(f"Work out {expression}.\n", 0)
            ids, classes = self.source.encode(sample.add(f"{steps}\nAnswer: {value}\n", ANSWER))
            row, mark = np.full(length, self.source.end_id, np.uint16), np.zeros(length, bool)
            row[: len(ids)], mark[: len(ids)] = ids, classes == ANSWER
            rows.append(row)
            marks.append(mark)
        best = self._best(np.stack(rows), state)
        for (expression, _, _), row, mark, guess in zip(made, rows, marks, best, strict=True):
            wrong = (guess[:-1] != row[1:]) & mark[1:]
            right.setdefault(expression.split()[1], []).append(not wrong.any())
        return {sign: _share(values) for sign, values in sorted(right.items())}

    def _losses(self, rows: np.ndarray, state: State) -> Tensor:
        """fp32 [n, T] cross entropies, on the CPU, of ids [n, T + 1]."""
        parts = []
        for ids in self._batches(rows):
            logits = self.model.logits(self.model(ids[:, :-1], state).hidden).float()
            losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
            parts.append(losses.view(len(ids), -1).cpu())
        return torch.cat(parts)[: len(rows)]

    def _best(self, rows: np.ndarray, state: State) -> np.ndarray:
        """int64 [n, T]: the likeliest token behind each of ids [n, T]."""
        parts = []
        for ids in self._batches(rows):
            best = self.model.logits(self.model(ids, state).hidden).argmax(-1)
            parts.append(best.view(len(ids), -1).cpu().numpy())
        return np.concatenate(parts)[: len(rows)]

    def _batches(self, rows: np.ndarray) -> Iterator[Tensor]:
        """Batches of one size, the last filled with the last row: kernels are built for a size."""
        size = max(1, self.sizes.batch_tokens // rows.shape[1])
        filled = np.concatenate([rows, np.repeat(rows[-1:], -len(rows) % size, axis=0)])
        for start in range(0, len(filled), size):
            yield torch.from_numpy(filled[start : start + size].astype(np.int64)).to(self.device)


@torch.no_grad()
def quantise_weights(model: DemoModel) -> None:
    """Put the values of the exported checkpoint in the place of the trained ones."""
    model.embed_tokens.copy_(model.embed_tokens.bfloat16().float())
    model.lm_head.weight.copy_(model.lm_head.weight.bfloat16().float())
    for name, module in model.named_modules():
        if isinstance(module, Moe):
            scale = quantise.expert_scale(module.w1.weight, module.w3.weight)
            for linear in (module.w1, module.w3):
                linear.weight.copy_(quantise.nvfp4(linear.weight, scale))
            own = quantise.expert_scale(module.w2.weight)
            module.w2.weight.copy_(quantise.nvfp4(module.w2.weight, own))
        elif isinstance(module, Linear) and module.weight.ndim == 2 and not name.endswith(_PLAIN):
            module.weight.copy_(quantise.mxfp8(module.weight))


_PLAIN = ("lm_head", ".gate")
"""Matrices that no checkpoint quantises: the head and the routers."""


def _share(values: list[bool]) -> float:
    return round(sum(values) / len(values), 4) if values else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", choices=("demo", "tiny"), default="demo")
    parser.add_argument("--directory", type=Path, default=BUILD / "run")
    parser.add_argument("--out", type=Path, default=BUILD / "run" / "quality.jsonl")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a smoke test's sizes")
    parser.add_argument("--share", default="1/1", metavar="K/N",
                        help="every Nth line only, from the Kth: for N processes")  # fmt: skip
    args = parser.parse_args()
    part, parts = (int(number) for number in args.share.split("/"))
    trainer, model = open_trainer(args.plan, 1.0, args.directory, args.device, 0)
    model.compile_layers(False)
    evaluation = Evaluation(model, trainer.source, SMALL if args.small else Sizes())
    run = {"step": trainer.step, "tokens": trainer.tokens, "device": _device(args.device),
           "torch": torch.__version__, **asdict(evaluation.sizes)}  # fmt: skip
    first = next(iter(cells().values()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as out:

        def write(weights: str, cell: str, values: dict[str, Any]) -> None:
            line = json.dumps({"weights": weights, "cell": cell, **values, "run": run})
            out.write(line + "\n")
            out.flush()
            print(line[: line.index(', "run"')], flush=True)

        if part == 1:
            write("trained", "full precision", {"held_out_loss": evaluation.loss(first)})
        quantise_weights(model)
        # Every part compares selections with those of full precision.
        evaluation.selections(first)
        for name, measure in [*evaluation.measures(first)][part - 1 :: parts]:
            write("shipped", name, measure())


def _device(name: str) -> str:
    return torch.cuda.get_device_name() if name == "cuda" else "cpu"


if __name__ == "__main__":
    main()
