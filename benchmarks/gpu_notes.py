"""What an engine computed for some prompts, noted row by row: its tokens, the logits they were
taken from, and every choice of experts and of blocks, with how near each was to falling otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from winnow.config import SamplingParams
from winnow.engine.llm import LLM
from winnow.ops.batch import Batch
from winnow.ops.codec import reference as codec
from winnow.ops.moe.reference import choose
from winnow.ops.paged import Paged, read
from winnow.ops.weights import MoeWeights
from winnow.spec.model import BLOCK_TOKENS, ModelSpec

BEST, COLUMNS = 16, 64
"""Largest logits of a row that are kept, and at most so many columns of it, evenly spread."""
KINDS = ("blocks", "experts")
"""A sparse layer's choices in their order. Depth d of a row is of kind d % 2."""


@dataclass(frozen=True)
class Noted:
    """One request. `length` tokens of prompt, `tokens` int64 [T] of its answer; of each token's row
    of logits the root mean square `rms` [T], the largest `best` [T, BEST] with their `ids`, and
    some `columns` [T, *], all fp32.

    `choices` int16 [positions, depths, *], padded with -1; `leads` fp32 [positions, depths]: how
    far the last one taken was ahead of the first one left, infinite where none was left.
    """

    length: Tensor
    tokens: Tensor
    rms: Tensor
    best: Tensor
    ids: Tensor
    columns: Tensor
    choices: Tensor
    leads: Tensor

    def lead(self, token: int) -> float:
        """Of the largest logit of a token's row, over the row's root mean square."""
        return float((self.best[token, 0] - self.best[token, 1]) / self.rms[token])


Answers = dict[str, list[Noted]]
"""One for each prompt, by dtype."""


class Watch:
    """Notes the choices and logits of an engine whose steps are computed as they are; of a row of
    logits at most `columns`, evenly spread."""

    def __init__(self, llm: LLM, columns: int = COLUMNS) -> None:
        self._columns = columns
        self._spans: list[tuple[str, int, int]] = []
        self._step: list[tuple[Tensor, Tensor]] = []
        self._logits: dict[str, list[tuple[Tensor, ...]]] = {}
        self._choices: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        runner = llm.engine.runner
        inputs, logits, model = runner.inputs, runner.logits, runner.model
        self._kernels = model.kernels

        def noting_inputs(plan: Any, requests: Any) -> Any:
            self._spans = [(row.request_id, row.start, row.count) for row in plan.rows]
            return inputs(plan, requests)

        def noting_logits(given: Any) -> Tensor:
            found = logits(given)
            self._end_step(given.sampled, found)
            return found

        model.kernels = replace(model.kernels, moe=self._moe, select_blocks=self._select_blocks)
        runner.inputs = noting_inputs  # type: ignore[method-assign]
        runner.logits = noting_logits  # type: ignore[method-assign]

    def noted(self, name: str, length: int, tokens: Sequence[int]) -> Noted:
        """What was noted of a request that has ended."""
        parts = self._choices[name]
        positions = length + len(tokens) - 1
        choices = torch.full((positions, *parts[0][1].shape[1:]), -1, dtype=torch.int16)
        leads = torch.zeros(choices.shape[:2])
        for start, taken, ahead in parts:
            choices[start : start + len(taken)] = taken
            leads[start : start + len(taken)] = ahead
        rms, best, ids, columns = (
            torch.stack(part) for part in zip(*self._logits[name], strict=True)
        )
        return Noted(
            torch.tensor(length), torch.tensor(tokens), rms, best, ids, columns, choices, leads
        )

    def _moe(self, x: Tensor, weights: MoeWeights, spec: ModelSpec) -> Tensor:
        products = x.double() @ weights.router.double().T
        chosen, _ = choose(products.float(), weights.router_bias, spec)
        ranked = (products.sigmoid() + weights.router_bias).sort(dim=1, descending=True).values
        last = spec.experts_per_token
        left = ranked[:, last] if last < spec.num_experts else -math.inf
        self._step.append((chosen.sort(dim=1).values, ranked[:, last - 1] - left))
        return self._kernels.moe(x, weights, spec)

    def _select_blocks(self, index_q: Tensor, index: Paged, batch: Batch, topk: int) -> Tensor:
        ids = self._kernels.select_blocks(index_q, index, batch, topk)
        leads = block_leads(index_q, index, batch, topk, [span[1:] for span in self._spans])
        self._step.append((ids.flatten(1), leads.to(ids.device)))
        return ids

    def _end_step(self, sampled: Sequence[str], logits: Tensor) -> None:
        width = max(taken.shape[1] for taken, _ in self._step)
        padded = [F.pad(taken, (0, width - taken.shape[1]), value=-1) for taken, _ in self._step]
        choices = torch.stack([taken.short() for taken in padded], 1).cpu()
        leads = torch.stack([ahead.float() for _, ahead in self._step], 1).cpu()
        self._step = []
        at = 0
        for name, start, count in self._spans:
            rows = slice(at, at + count)
            self._choices.setdefault(name, []).append((start, choices[rows], leads[rows]))
            at += count
        best = logits.topk(BEST, dim=1)
        parts = (logits.square().mean(1).sqrt(), *best, spread_columns(logits, self._columns))
        for name, *row in zip(sampled, *(part.cpu() for part in parts), strict=True):
            self._logits.setdefault(name, []).append(tuple(part.clone() for part in row))


class StoredPages:
    """Keeps what an engine stored of each request, as it is after the request's last row."""

    def __init__(self, llm: LLM) -> None:
        self._plan: list[tuple[str, list[int]]] = []
        self._rows: dict[str, Tensor] = {}
        runner = llm.engine.runner
        inputs, logits, storage = runner.inputs, runner.logits, runner.storage

        def noting_inputs(plan: Any, requests: Any) -> Any:
            self._plan = [(row.request_id, list(row.pages)) for row in plan.rows]
            return inputs(plan, requests)

        def keeping_pages(given: Any) -> Tensor:
            found = logits(given)
            for name, pages in self._plan:
                self._rows[name] = storage.rows[pages]
            return found

        runner.inputs = noting_inputs  # type: ignore[method-assign]
        runner.logits = keeping_pages  # type: ignore[method-assign]

    def of(self, name: str) -> Tensor:
        """The page of each of a request's blocks, uint8 [blocks, row_bytes]."""
        return self._rows[name].cpu()


def block_leads(
    index_q: Tensor, index: Paged, batch: Batch, topk: int, spans: Sequence[tuple[int, int]]
) -> Tensor:
    """fp64 [rows] on the CPU: how far the last block taken leads the first one left, as a share of
    `score_size`, the least of a row's heads; infinite where all are taken. `spans`: the first
    position and the number of rows of each request."""
    leads = torch.full((index_q.shape[0],), math.inf, dtype=torch.float64)
    for rows, scores in block_scores(index_q, index, batch, topk, spans):
        ranked = scores.sort(descending=True).values
        last, next_one = ranked[..., topk - 2], ranked[..., topk - 1]
        leads[rows] = ((last - next_one) / score_size(scores)).amin(1)
    return leads


def score_size(scores: Tensor) -> Tensor:
    """[rows, heads]: the root mean square of the finite ones of the scores [rows, heads, blocks].
    What rounding moves a score by hangs on the size of its products, not on their sum: a score near
    0 is as uncertain as its neighbours."""
    seen = scores.isfinite()
    squares = scores.masked_fill(~seen, 0.0).square().sum(-1)
    # Scores that are all 0 tie: no distance over no size would be no number.
    return (squares / seen.sum(-1)).sqrt().clamp(min=torch.finfo(scores.dtype).tiny)


def block_scores(
    index_q: Tensor, index: Paged, batch: Batch, topk: int, spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each request with rows that cannot take all their blocks: these rows, int64 [n], and the
    fp64 scores [n, heads, blocks] of the blocks before their own, -inf from their own on."""
    end = 0
    for request, (start, count) in enumerate(spans):
        past = (start + torch.arange(count)) // BLOCK_TOKENS
        own = (past >= topk).nonzero().flatten()
        rows, end = end + own, end + count
        if not len(own):
            continue
        blocks = int(past[-1])
        keys = read(codec, index, batch.block_tables[request, :blocks].cpu(), torch.float32)
        keys = keys.cpu().double().reshape(-1, index_q.shape[2])
        products = index_q[rows.to(index_q.device)].cpu().double() @ keys.T
        scores = products.unflatten(2, (blocks, BLOCK_TOKENS)).amax(3)
        ahead = torch.arange(blocks) >= past[own].view(-1, 1, 1)
        yield rows, scores.masked_fill(ahead, -math.inf)


def spread_columns(logits: Tensor, most: int) -> Tensor:
    """At most so many columns, evenly spread."""
    return logits[:, :: -(-logits.shape[1] // most)]


def noted_answers(
    llm: LLM, given: Sequence[list[int]], params: SamplingParams, columns: int = COLUMNS
) -> list[Noted]:
    """Answer the prompts and note everything."""
    watch = Watch(llm, columns)
    answers = llm.generate(given, params)
    return [
        watch.noted(f"offline-{number}", len(prompt), answer.token_ids)
        for number, (prompt, answer) in enumerate(zip(given, answers, strict=True))
    ]


def machine() -> str:
    """The processor that computes here, its instructions for bf16, and torch."""
    said = Path("/proc/cpuinfo").read_text().splitlines()
    lines = {
        name.strip(): words.strip() for name, _, words in (line.partition(":") for line in said)
    }
    narrow = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in lines["flags"].split()]
    return (
        f"{lines['model name']} ({', '.join(narrow) or 'no instructions for bf16'}), "
        f"torch {torch.__version__}"
    )


def save(path: Path, found: Mapping[str, Answers], where: str) -> None:
    """Write answers by checkpoint and dtype, and where they were computed."""
    arrays = {"where": np.array(where)}
    for name, answers in found.items():
        for dtype, noted in answers.items():
            for field in fields(Noted):
                values = [getattr(one, field.name) for one in noted]
                kept = torch.cat([value.reshape(-1, *value.shape[1:]) for value in values])
                # Most of the file, and three digits of a lead are enough.
                kept = kept.half() if field.name == "leads" else kept
                arrays[f"{name}|{dtype}|{field.name}"] = kept.numpy()
    with path.open("wb") as out:
        np.savez_compressed(out, **arrays)


def load(path: Path) -> tuple[dict[str, Answers], str]:
    """What `save` wrote."""
    found: dict[str, Answers] = {}
    with np.load(path) as arrays:
        where = str(arrays["where"])
        keys = sorted({tuple(key.split("|")[:2]) for key in arrays.files if "|" in key})
        for name, dtype in keys:
            whole = {
                field.name: torch.from_numpy(arrays[f"{name}|{dtype}|{field.name}"])
                for field in fields(Noted)
            }
            whole["leads"] = whole["leads"].float()
            found.setdefault(name, {})[dtype] = _apart(whole)
    return found, where


def _apart(whole: Mapping[str, Tensor]) -> list[Noted]:
    """Requests that were written one after another, all with as many tokens."""
    lengths = whole["length"].tolist()
    tokens = len(whole["tokens"]) // len(lengths)
    sizes = {name: [tokens] * len(lengths) for name in whole}
    sizes |= {name: [n + tokens - 1 for n in lengths] for name in ("choices", "leads")}
    parts = {name: whole[name].split(sizes[name]) for name in whole if name != "length"}
    return [
        Noted(length=whole["length"][i], **{name: own[i] for name, own in parts.items()})
        for i in range(len(lengths))
    ]
