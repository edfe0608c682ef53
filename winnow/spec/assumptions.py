"""What a plan took for granted, in sentences: printed with every plan. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from winnow.spec.cost import Storage
from winnow.spec.hardware import Gpu, Peaks
from winnow.spec.memory import bytes_per_token
from winnow.spec.model import ModelSpec
from winnow.spec.page import RowLayout
from winnow.spec.parallel import ParallelPlan
from winnow.spec.roofline import PREFILL_CHUNK


def assumptions(
    spec: ModelSpec,
    storage: Storage,
    parallel: ParallelPlan,
    gpu: Gpu | None,
    settings: Mapping[str, Any],
) -> tuple[str, ...]:
    """One sentence a thing; `settings` are those of `winnow.spec.capacity.Plan`."""
    sentences = [*_weights(storage), _ranks(spec, parallel), *_cache(spec, storage, settings)]
    sentences += spec.notes
    if gpu is None:
        sentences.append("no GPU was named: what fits and how fast it can be is not said")
        return tuple(sentences)
    sentences += _memory(gpu, settings)
    if gpu.peaks is None:
        sentences.append(f"the peaks of {gpu.name} are not known: no roofline")
    else:
        sentences += _roofline(storage, parallel, gpu.peaks)
    return tuple(sentences)


def _weights(storage: Storage) -> Iterator[str]:
    yield (
        f"weights on a rank: as this engine holds them, routed experts {storage.experts.name}, "
        f"other matrices {storage.linear.name} (index projections too), embedding and head "
        f"{storage.plain.name}, norms and router fp32"
    )
    yield (
        "checkpoint: the same on disk, with the vision tower, the projector and the MTP modules "
        "that config.json names, which are not loaded"
    )


def _ranks(spec: ModelSpec, parallel: ParallelPlan) -> str:
    if parallel.num_ranks == 1:
        return "tp1: one GPU holds the whole model"
    words = []
    if parallel.tp_size > 1:
        words.append(f"heads, MLP columns and vocabulary divided among {parallel.tp_size} ranks")
    if parallel.tp_size > spec.num_kv_heads:
        words.append(f"each KV head held by {parallel.tp_size // spec.num_kv_heads} of them")
    if parallel.dp_size > 1:
        words.append(
            f"{parallel.dp_size} groups with sequences of their own, each with all of the model "
            "but the experts"
        )
    words.append(
        f"experts divided among {parallel.ep_size} ranks"
        if parallel.expert_tp_size == 1
        else f"columns of every expert divided among {parallel.expert_tp_size} ranks"
    )
    if parallel.dcp_size > 1:
        words.append(f"index keys scanned in {parallel.dcp_size} parts, stored whole on every rank")
    return f"{parallel}: {'; '.join(words)}"


def _cache(spec: ModelSpec, storage: Storage, settings: Mapping[str, Any]) -> Iterator[str]:
    if not settings["charge_index"]:
        layout = RowLayout.of(spec, storage.kv, storage.index)
        yield (
            f"index cache NOT charged: its {bytes_per_token(layout).index:,} bytes a token are "
            "left out of what fits, as in published capacities; this engine stores them"
        )
    if settings["draft"]:
        yield (
            f"draft: K and V of {settings['draft']} layers in fp8 in every row; "
            "the draft model's weights are not counted; this version's engine stores no draft"
        )


def _memory(gpu: Gpu, settings: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"memory: {settings['memory_fraction']:.0%} of {gpu.memory_bytes / 1e9:.1f} GB, of which "
        f"{settings['reserve_bytes'] / 1e9:.1f} GB are kept for activations, graphs and the "
        "allocator (--reserve-gb)"
    )
    yield f"sequences of {settings['context']:,} tokens that share no page"


def _roofline(storage: Storage, parallel: ParallelPlan, peaks: Peaks) -> Iterator[str]:
    yield (
        f"peaks: {peaks.bandwidth / 1e12:.2f} TB/s, dense products {peaks.bf16 / 1e12:,.0f} "
        f"TFLOP/s in bf16, {peaks.fp8 / 1e12:,.0f} in fp8"
        + (f", {peaks.fp4 / 1e12:,.0f} in fp4" if peaks.fp4 else "")
        + f", {peaks.link_bandwidth / 1e9:,.0f} GB/s sent to other GPUs (datasheets)"
    )
    yield (
        f"products: experts in {peaks.weight_operand(storage.experts)}, other matrices in "
        f"{peaks.weight_operand(storage.linear)}, index scan in "
        f"{peaks.cache_operand(storage.index)}, attention in {peaks.cache_operand(storage.kv)}; "
        "formats that the tensor cores do not take count at the peak of bf16"
    )
    yield (
        "floors: each part at its peak, one after another, activations kept between products; "
        "no launches, no latency; experts chosen uniformly and evenly spread"
    )
    yield f"prefill: no cached prefix, chunks of {PREFILL_CHUNK:,} tokens"
    if parallel.num_ranks > 1:
        yield "collectives: rings and direct sends in the compute dtype, nothing hidden"
