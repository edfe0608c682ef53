"""`python -m train.run`: train the demo model, phase after phase.

Stops when the plan or the time is over and saves its state; started again, it goes on from there
as if it had not stopped. Logs a JSON line every few steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from train import plan as plans
from train.corpus import BUILD
from train.geometry import spec
from train.heldout import HeldOut, held_out, windows
from train.losses import indexer_loss, teaching_rows, token_loss
from train.mixture import Sequences, Source
from train.model import DemoModel, Moe, State, make
from train.optimiser import Optimiser
from train.plan import Phase, Plan
from train.sample import TEXT

_BIAS_STEP = 1e-3
"""By which a step moves each expert's bias towards an even load (arXiv 2408.15664)."""
_HELD_OUT_EVERY = 100


class Trainer:
    """A model in training, with all that is needed to go on later."""

    log_every = 20

    def __init__(self, plan: Plan, device: torch.device, *, workers: int) -> None:
        cuda = device.type == "cuda"
        self.plan, self.device, self.workers = plan, device, workers
        self.spec = spec(plan.geometry)
        dtype = torch.bfloat16 if cuda else torch.float32
        self.model = make(self.spec, dtype, plan.seed, compiled=cuda).to(device)
        self.optimiser = Optimiser(
            self.model.named_parameters(), matrix_rate=plan.matrix_rate,
            adam_rate=plan.adam_rate, decay=plan.decay,
        )  # fmt: skip
        self.step = 0
        self.tokens = 0
        self.source = Source()
        self._token_loss = torch.compile(token_loss, dynamic=False) if cuda else token_loss

    def save(self, path: Path) -> None:
        state = {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict(),
                 "step": self.step, "tokens": self.tokens}  # fmt: skip
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.tokens = state["step"], state["tokens"]

    def run(self, deadline: float, log: Path) -> None:
        """Train until the plan ends or `time.monotonic()` passes `deadline`."""
        with log.open("a") as out:
            while self.step < self.plan.steps and time.monotonic() < deadline:
                number, done = self.plan.phase_at(self.step)
                self._phase(number, done, deadline, out)

    def _phase(self, number: int, done: int, deadline: float, out: Any) -> None:
        phase = self.plan.phases[number]
        last, since = time.monotonic(), 0
        for ids, classes in self._batches(number, done):
            values = self.train_step(phase, ids, classes)
            self.step, self.tokens = self.step + 1, self.tokens + ids[:, 1:].numel()
            since += ids[:, 1:].numel()
            if self.step % self.log_every == 0 or self.step == 1:
                now = time.monotonic()
                record = {"step": self.step, "phase": phase.name, "tokens": self.tokens,
                          **{k: round(float(v), 4) for k, v in values.items()},
                          "rate": round(self.plan.factor(self.step), 4),
                          "tokens_per_second": round(since / (now - last))}  # fmt: skip
                last, since = now, 0
                if self.step % _HELD_OUT_EVERY == 0 or self.step == self.plan.steps:
                    record["held_out_loss"] = round(self._held_out(phase), 4)
                out.write(json.dumps(record) + "\n")
                out.flush()
                print(json.dumps(record), flush=True)
            if time.monotonic() > deadline:
                return

    def train_step(self, phase: Phase, ids: Tensor, classes: Tensor) -> dict[str, Tensor]:
        """One update; its losses, still on the device."""
        # What is drawn in a step depends on its number alone, so that a resumed run draws the same.
        torch.manual_seed(self.step)
        inputs, targets, kinds = ids[:, :-1].long(), ids[:, 1:].long(), classes[:, 1:]
        out = self.model(inputs, phase.state, probe=phase.indexer_rows > 0)
        weight, total, answers, answer_total = self._token_loss(
            out.hidden, self.model.lm_head.weight, targets.flatten(), kinds.flatten()
        )
        weight = weight.clamp(min=1.0)
        values = {"loss": (total / weight).detach(),
                  "answer_loss": (answer_total / answers.clamp(min=1.0)).detach()}  # fmt: skip
        loss = total / weight
        if phase.indexer_rows:
            rows = teaching_rows(kinds, phase.indexer_rows)
            divergences = [indexer_loss(probe, rows) for probe in out.probes.values()]
            loss = loss + torch.stack(divergences).mean()
            values["indexer_kl"] = torch.stack(divergences).mean().detach()
        loss.backward()
        # Parameters that a phase does not use have no gradient.
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.optimiser.step(self.plan.factor(self.step))
        values["load_max"] = torch.stack(
            [self._balance(*pair) for pair in self._moes(out.loads)]
        ).max()
        return values

    def _held_out(self, phase: Phase) -> float:
        """Mean loss of a batch of held-out text, with gradients on so that the compiled parts are
        those of training."""
        length = phase.mixture.seq_len
        ids = torch.from_numpy(windows(self._text, length, phase.batch).astype(np.int64))
        ids = ids.to(self.device)
        out = self.model(ids[:, :-1], phase.state)
        targets = ids[:, 1:].flatten()
        classes = torch.full_like(targets, TEXT, dtype=torch.uint8)
        weight, total, *_ = self._token_loss(
            out.hidden, self.model.lm_head.weight, targets, classes
        )
        return float((total / weight).detach())

    @cached_property
    def _text(self) -> list[HeldOut]:
        return held_out(self.source)

    def _moes(self, loads: list[Tensor]) -> Iterator[tuple[Moe, Tensor]]:
        moes = [layer.mlp for layer in self.model.layers if isinstance(layer.mlp, Moe)]
        yield from zip(moes, loads, strict=True)

    def _balance(self, moe: Moe, load: Tensor) -> Tensor:
        """Move the router's biases; the largest load over the mean."""
        mean = load.mean()
        moe.e_score_correction_bias.add_(_BIAS_STEP * torch.sign(mean - load))
        return load.max() / mean

    def _batches(self, number: int, done: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The phase's batches from step `done` on: ids int32 and classes uint8 [B, T + 1]."""
        phase = self.plan.phases[number]
        # Opened before worker processes start, so that they share it.
        self.source.open()
        data = Sequences(phase.mixture, seed=self.plan.seed * 1000 + number, source=self.source)
        order = _Range(done * phase.batch, phase.steps * phase.batch)
        loader = DataLoader(
            data, batch_size=phase.batch, sampler=order, num_workers=self.workers,
            collate_fn=_collate, pin_memory=self.device.type == "cuda",
            prefetch_factor=4 if self.workers else None,
        )  # fmt: skip
        for ids, classes in loader:
            yield ids.to(self.device, non_blocking=True), classes.to(self.device, non_blocking=True)


class _Range(Sampler[int]):
    def __init__(self, start: int, stop: int) -> None:
        self.range = range(start, stop)

    def __iter__(self) -> Iterator[int]:
        return iter(self.range)

    def __len__(self) -> int:
        return len(self.range)


def _collate(items: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor]:
    ids, classes = (np.stack(column) for column in zip(*items, strict=True))
    return torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(classes)


def native_state(plan: Plan) -> State:
    """How the model of a plan is meant to be served: as its last phase trained it."""
    return plan.phases[-1].state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", choices=("demo", "tiny"), default="demo")
    parser.add_argument("--share", type=float, default=1.0, help="of the plan's steps")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop and save after these")
    parser.add_argument("--directory", type=Path, default=BUILD / "run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--log-every", type=int, default=Trainer.log_every, help="steps")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    trainer, _ = open_trainer(args.plan, args.share, args.directory, args.device, args.workers)
    trainer.log_every = args.log_every
    trainer.run(deadline, args.directory / "train.jsonl")
    trainer.save(args.directory / "state.pt")
    print(f"step {trainer.step} of {trainer.plan.steps}, {trainer.tokens} tokens")


def open_trainer(
    name: str, share: float, directory: Path, device: str, workers: int
) -> tuple[Trainer, DemoModel]:
    """A trainer at the state that `directory` holds, or at the beginning."""
    torch._dynamo.config.cache_size_limit = 64
    plan = {"demo": plans.DEMO, "tiny": plans.TINY}[name]
    plan = plan if share == 1.0 else plans.shrunk(plan, share)
    directory.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(plan, torch.device(device), workers=workers)
    if (directory / "state.pt").exists():
        trainer.load(directory / "state.pt")
    return trainer, trainer.model


if __name__ == "__main__":
    main()
