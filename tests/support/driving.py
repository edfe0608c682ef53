"""Driving an engine a step at a time, looking at what it usually keeps to itself."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from winnow.config import EngineConfig, SamplingParams
from winnow.core.request import Request
from winnow.engine.build import build_engine
from winnow.engine.engine import Engine
from winnow.ops.batch import Batch
from winnow.ops.codec import reference as codec
from winnow.ops.paged import Paged, read

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def engine(directory: Path, *, shuffle: bool = True, poison: bool = True, **options: Any) -> Engine:
    """An engine whose free pages hold NaN bytes and are handed out in random order."""
    options = {"num_pages": 128, **options}
    built = build_engine(str(directory), EngineConfig(**options), progress=False)
    if poison:
        built.runner.storage.rows.fill_(0xFF)
    if shuffle:
        random.Random(7).shuffle(built.scheduler.cache.pool._free)
    return built


def all_logits(built: Engine, prompt: list[int], request_id: str = "logits") -> tuple[Tensor, int]:
    """Logits of every prompt position that is computed, and how many came from the cache."""
    request = Request(request_id=request_id, prompt=tuple(prompt), max_tokens=1)
    built.scheduler.add(request)
    parts = []
    while not request.is_finished:
        plan = built.scheduler.plan()
        inputs = built.runner.inputs(plan, {request_id: request})
        every = replace(inputs, logit_rows=torch.arange(plan.num_rows))
        parts.append(built.runner.logits(every))
        last = int(parts[-1][-1].argmax())
        built.scheduler.complete(plan, dict.fromkeys(inputs.sampled, last))
    return torch.cat(parts), request.num_cached


def selection_leads(built: Engine, prompt: list[int]) -> Tensor:
    """By how much each selection that leaves a block out was decided: score of the last block
    taken on its rank less that of the first one left, over all layers, rows and heads."""
    kernels = built.runner.model.kernels
    leads: list[Tensor] = []

    def select(index_q: Tensor, index: Paged, batch: Batch, topk: int) -> Tensor:
        num_blocks = int(batch.kv_lens[0] - 1) // 128 + 1
        keys = read(codec, index, batch.block_tables[0, :num_blocks], torch.float32)
        products = torch.einsum("rhd,btd->rhbt", index_q, keys[:, 0].nan_to_num())
        current = batch.positions // 128
        ahead = torch.arange(num_blocks) >= current.unsqueeze(-1)
        scores = products.amax(-1).masked_fill(ahead.unsqueeze(1), float("-inf"))
        ranked = scores[current >= topk].sort(dim=-1, descending=True).values
        leads.append((ranked[..., topk - 2] - ranked[..., topk - 1]).flatten())
        return kernels.select_blocks(index_q, index, batch, topk)

    built.runner.model.kernels = replace(kernels, select_blocks=select)
    all_logits(built, prompt, "leads")
    built.runner.model.kernels = kernels
    return torch.cat(leads)


def greedy(built: Engine, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
    """Greedy tokens of one request through the engine, and its cached tokens."""
    built.add("greedy", prompt, SamplingParams(max_tokens=max_tokens, **GREEDY))
    tokens: list[int] = []
    while built.has_work:
        for output in built.step():
            tokens += output.token_ids
            assert output.error is None
            if output.usage is not None:
                cached = output.usage.cached_tokens
    return tokens, cached


def prompt_of(num_tokens: int, vocab: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed + num_tokens)
    return torch.randint(vocab, (num_tokens,), generator=generator).tolist()
