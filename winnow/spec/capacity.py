"""What a model takes and what fits: the sums behind `winnow plan`. No torch, no measurements.

A `Question` is what a user asks, in words; `plan` answers it with one `Plan`, which says what it
assumed. The engine sizes its own cache with the same `RowLayout` and `plan_memory`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winnow.errors import CheckpointError, UnsupportedError
from winnow.spec.assumptions import assumptions
from winnow.spec.cost import Storage
from winnow.spec.embedded import checkpoint_path
from winnow.spec.formats import BF16, FORMATS, FP32, MXFP8, NVFP4, Format, cache_format
from winnow.spec.hardware import Gpu, find_gpu
from winnow.spec.memory import bytes_per_token, plan_memory, weight_bytes
from winnow.spec.model import BLOCK_TOKENS, ModelSpec
from winnow.spec.page import RowLayout
from winnow.spec.parallel import ParallelPlan
from winnow.spec.presets import PRESETS, preset_config
from winnow.spec.roofline import Floor, Machine
from winnow.spec.stored import checkpoint_bytes

WEIGHT_FORMATS: dict[str, tuple[Format | None, Format | None]] = {
    "none": (None, None),
    "mxfp8": (MXFP8, MXFP8),
    "modelopt-nvfp4": (NVFP4, None),
    "mixed-nvfp4": (NVFP4, MXFP8),
}
"""Formats of (routed experts, other matrices) by kind of checkpoint; None is the plain dtype."""

WEIGHT_WORDS = ("checkpoint", "plain", "mxfp8", "nvfp4")
"""What a user may ask of weights: as the checkpoint stores them, its plain dtype, or a format."""

CONTEXTS = (4096, 32_768, 131_072, 524_288)
BATCHES = (1, 8, 32, 128, 512)
"""What the roofline is shown at, beside the context asked for."""

_DEFAULT_CONTEXT = 131_072


@dataclass(frozen=True)
class Question:
    """What a plan is asked for. None leaves a choice open, and the plan says what it took.

    `gpu` is a word for `find_gpu`, `parallel` one for `ParallelPlan.parse`; `context` are tokens
    of one sequence, `reserve_bytes` what each GPU keeps for all but weights and pages.
    """

    model: str
    gpu: str | None = None
    gpus: int | None = None
    parallel: str | None = None
    context: int | None = None
    kv: str = "model"
    index: str = "model"
    experts: str = "checkpoint"
    linear: str = "checkpoint"
    draft: int = 0
    memory_fraction: float = 0.9
    reserve_bytes: int = 0
    charge_index: bool = True


@dataclass(frozen=True)
class Fit:
    """What fits on each GPU, and in all replicas together.

    `num_pages` includes the null page. `num_tokens` are those of one tensor-parallel group, whose
    ranks hold the same tokens, so it is also the longest sequence.
    """

    usable_bytes: int
    reserve_bytes: int
    charged_row_bytes: int
    num_pages: int
    num_tokens: int
    sequences_per_group: int
    sequences: int


@dataclass(frozen=True)
class Roofline:
    """Floors of decode steps at CONTEXTS and BATCHES, and of prefill at CONTEXTS."""

    decode: tuple[Floor, ...]
    prefill: tuple[Floor, ...]


@dataclass(frozen=True)
class Plan:
    """One answer. Weights, tokens and rows are those of one rank, the checkpoint is whole.

    `fit` is None without a GPU, `roofline` also where its peaks are not known.
    """

    settings: dict[str, Any]
    assumptions: tuple[str, ...]
    checkpoint: dict[str, int]
    checkpoint_bytes: int
    weights: dict[str, int]
    weight_bytes: int
    token_bytes: dict[str, int]
    row_parts: dict[str, int]
    row_bytes: int
    row_pieces: int
    fit: Fit | None
    roofline: Roofline | None


def open_config(model: str) -> Mapping[str, Any]:
    """The config.json of a preset or of a checkpoint directory."""
    if model in PRESETS:
        return preset_config(model)
    path = checkpoint_path(model) / "config.json"
    if not path.is_file():
        raise UnsupportedError(
            f"{model!r} is neither a preset ({', '.join(PRESETS)}) nor a directory with config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return config


def plan(question: Question) -> Plan:
    """Answer one question.

    Raises UnsupportedError for what does not go together, CapacityError when the weights do not
    fit, CheckpointError for a damaged config.json.
    """
    config = open_config(question.model)
    spec = ModelSpec.from_hf(config)
    gpu = None if question.gpu is None else find_gpu(question.gpu)
    storage = _storage(question, spec)
    parallel, replicas = _ranks(question)
    context = _context(question, spec)
    _check_draft(question, spec)
    formats = (storage.experts, storage.linear, storage.plain)
    weights = weight_bytes(spec, *formats, share=parallel.share(spec))
    stored = checkpoint_bytes(config, spec, *formats)
    layout = RowLayout.of(
        spec,
        storage.kv,
        storage.index,
        tp_size=parallel.tp_size,
        draft_layers=question.draft,
    )
    fit = roofline = None
    if gpu is not None:
        groups = parallel.dp_size * replicas
        fit = _fit(question, gpu, layout, sum(weights.values()), groups, context)
        if gpu.peaks is not None:
            roofline = _roofline(Machine(spec, storage, parallel, gpu.peaks), fit, context)
    settings = {
        "model": question.model,
        "gpu": None if gpu is None else gpu.name,
        "gpus": parallel.num_ranks * replicas,
        "parallel": str(parallel),
        "replicas": replicas,
        "context": context,
        "kv": storage.kv.name,
        "index": storage.index.name,
        "experts": storage.experts.name,
        "linear": storage.linear.name,
        "plain": storage.plain.name,
        "draft": question.draft,
        "memory_bytes": None if gpu is None else gpu.memory_bytes,
        "memory_fraction": question.memory_fraction,
        "reserve_bytes": question.reserve_bytes,
        "charge_index": question.charge_index,
    }
    token = bytes_per_token(layout)
    return Plan(
        settings=settings,
        assumptions=assumptions(spec, storage, parallel, gpu, settings),
        checkpoint=stored,
        checkpoint_bytes=sum(stored.values()),
        weights=weights,
        weight_bytes=sum(weights.values()),
        token_bytes={"kv": token.kv, "index": token.index, "draft": token.draft},
        row_parts={
            "index": layout.index_bytes,
            "kv": layout.kv_bytes,
            "draft": layout.draft_bytes,
        },
        row_bytes=layout.row_bytes,
        row_pieces=len(list(layout.pieces())),
        fit=fit,
        roofline=roofline,
    )


def differences(plans: Sequence[Plan]) -> dict[str, list[Any]]:
    """The settings in which plans differ, with the value of each plan."""
    values = {name: [each.settings[name] for each in plans] for name in plans[0].settings}
    return {name: column for name, column in values.items() if len(set(column)) > 1}


def _storage(question: Question, spec: ModelSpec) -> Storage:
    plain = {"float32": FP32, "bfloat16": BF16}[spec.dtype]
    experts, linear = WEIGHT_FORMATS[spec.quantization]
    return Storage(
        experts=_weight_format(question.experts, experts or plain, plain),
        linear=_weight_format(question.linear, linear or plain, plain),
        plain=plain,
        kv=cache_format(question.kv, plain),
        index=cache_format(question.index, plain),
    )


def _weight_format(word: str, stored: Format, plain: Format) -> Format:
    if word not in WEIGHT_WORDS:
        raise ValueError(f"unknown weight format {word!r}: use one of {', '.join(WEIGHT_WORDS)}")
    return {"checkpoint": stored, "plain": plain}.get(word) or FORMATS[word]


def _ranks(question: Question) -> tuple[ParallelPlan, int]:
    """How the GPUs divide one replica of the model, and the number of replicas."""
    if question.parallel is None:
        return ParallelPlan(tp_size=question.gpus or 1), 1
    parallel = ParallelPlan.parse(question.parallel)
    ranks = parallel.num_ranks
    gpus = question.gpus or ranks
    if gpus % ranks:
        raise UnsupportedError(
            f"{gpus} GPUs do not divide into replicas of {parallel}, which take {ranks} each: "
            f"use {ranks * max(1, gpus // ranks)} GPUs or another plan"
        )
    return parallel, gpus // ranks


def _context(question: Question, spec: ModelSpec) -> int:
    context = question.context or min(_DEFAULT_CONTEXT, spec.max_positions)
    if context > spec.max_positions:
        raise UnsupportedError(
            f"a context of {context} tokens was asked for, the model has {spec.max_positions} "
            f"positions: lower it to {spec.max_positions}"
        )
    return context


def _check_draft(question: Question, spec: ModelSpec) -> None:
    """A draft runs before its model to save time: one with as many layers saves none."""
    if question.draft > spec.num_layers:
        raise UnsupportedError(
            f"{question.draft} draft layers were asked for, the model itself has "
            f"{spec.num_layers}: give 0 to {spec.num_layers}"
        )


def _fit(
    question: Question, gpu: Gpu, layout: RowLayout, weights: int, groups: int, context: int
) -> Fit:
    row_bytes = layout.row_bytes - (0 if question.charge_index else layout.index_bytes)
    memory = plan_memory(
        gpu.memory_bytes, weights, row_bytes, question.memory_fraction, question.reserve_bytes
    )
    per_group = memory.num_sequences(context)
    return Fit(
        usable_bytes=memory.usable_bytes,
        reserve_bytes=memory.reserve_bytes,
        charged_row_bytes=row_bytes,
        num_pages=memory.num_pages,
        num_tokens=memory.num_tokens,
        sequences_per_group=per_group,
        sequences=groups * per_group,
    )


def _roofline(machine: Machine, fit: Fit, context: int) -> Roofline:
    """Of one replica: batches are the sequences of its groups together."""
    groups = machine.plan.dp_size
    full = groups * fit.sequences_per_group
    known = {c for c in CONTEXTS if c <= machine.spec.max_positions}
    contexts = sorted(known | {context})
    batches = sorted({*BATCHES, full} - {0})
    return Roofline(
        decode=tuple(
            machine.decode(tokens, batch, batch <= groups * (fit.num_tokens // _padded(tokens)))
            for tokens in contexts
            for batch in batches
        ),
        prefill=tuple(machine.prefill(tokens) for tokens in contexts),
    )


def _padded(tokens: int) -> int:
    """Tokens of the pages that hold a sequence."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
