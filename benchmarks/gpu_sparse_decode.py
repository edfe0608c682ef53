"""Sparse attention of decode rows on a Hopper GPU, beside the read bandwidth of the same run.

Pages are whole rows of MiniMax-M3.1's 60 layers, up to 82 GB of them, chosen at random; launches
go from layer to layer as a step does, so that no launch finds its bytes in L2. Every size is
compared with plain arithmetic first. Appends records to benchmarks/h200-sparse-decode.jsonl.

    python benchmarks/gpu_sparse_decode.py [--format nvfp4|fp8|bf16] [--only REQUESTSxROWS]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from winnow.bench.machine import commit, machine, software
from winnow.bench.record import Record, append
from winnow.ops.batch import Batch
from winnow.ops.case import error
from winnow.ops.codec import reference as codec
from winnow.ops.paged import LayerPages, layer_pages, read
from winnow.ops.sparse_attention import hopper
from winnow.spec.formats import BF16, FORMATS, FP8, Format
from winnow.spec.model import BLOCK_TOKENS
from winnow.spec.page import RowLayout

LAYERS, HEADS, KV_HEADS, DIM, TOPK = 60, 64, 4, 128, 16
MULTIPROCESSORS = 132
POOL_BYTES = 82 << 30
SIZES = ((1, 1), (8, 1), (16, 1), (32, 1), (64, 1), (128, 1), (256, 1), (64, 4), (64, 8))
"""Requests and their rows. Contexts are 32,768 tokens, or what the pages hold."""
TOLERANCE = 2.0**-8


@dataclass(frozen=True)
class Work:
    """Decode rows of `requests`, each row with a selection of its own."""

    q: Tensor
    ids: Tensor
    batch: Batch
    out: Tensor


def layout_of(kv: Format) -> RowLayout:
    return RowLayout(LAYERS, tuple(range(LAYERS)), KV_HEADS, DIM, DIM, kv, kv)


def pool(kv: Format) -> tuple[Tensor, list[LayerPages]]:
    """Rows of random codes, finite and of moderate size, and their layers."""
    layout = layout_of(kv)
    num_pages = 1 << (POOL_BYTES // layout.row_bytes).bit_length() - 1
    rows = torch.empty(num_pages, layout.row_bytes, dtype=torch.uint8, device="cuda")
    rows.view(torch.int64).random_(-(1 << 62), 1 << 62)
    layers = [layer_pages(rows, layout, layer) for layer in range(LAYERS)]
    for pages in layers:
        for paged in (pages.key, pages.value):
            if paged.scales is not None:
                scales = paged.scales.view(torch.uint8)
                scales.copy_(torch.randint(0x28, 0x48, scales.shape, device="cuda").byte())
            elif kv is FP8:  # exponents of 2^-8 to 1.75
                paged.codes.view(torch.uint8).bitwise_and_(0xBF)
            elif kv is BF16:
                paged.codes.normal_()
    return rows, layers


def work(num_pages: int, requests: int, rows_each: int, generator: torch.Generator) -> Work:
    blocks = min(num_pages // requests, 256)
    tables = torch.randperm(num_pages, generator=generator, device="cuda")[: requests * blocks]
    rows, kv_len = requests * rows_each, blocks * BLOCK_TOKENS
    last = torch.arange(kv_len - rows_each, kv_len, device="cuda")
    starts = torch.arange(0, rows + 1, rows_each, device="cuda")
    past = torch.rand(rows, KV_HEADS, blocks - 1, generator=generator, device="cuda")
    chosen = past.topk(TOPK - 1).indices.sort(-1).values
    current = torch.full_like(chosen[..., :1], blocks - 1)
    q = torch.randn(rows, HEADS, DIM, generator=generator, device="cuda").bfloat16()
    batch = Batch(
        positions=last.repeat(requests),
        row_request=torch.arange(requests, device="cuda").repeat_interleave(rows_each),
        row_starts=starts,
        kv_lens=torch.full((requests,), kv_len, device="cuda"),
        block_tables=tables.view(requests, blocks),
    )
    return Work(q, torch.cat([chosen, current], -1).int(), batch, torch.empty_like(q))


def plain(w: Work, pages: LayerPages, row: int) -> Tensor:
    """One row by the definition, in fp32 on the GPU."""
    table = w.batch.block_tables[w.batch.row_request[row]]
    visible = int(w.batch.positions[row]) + 1
    outs = []
    for head, ids in enumerate(w.ids[row].long()):
        k, v = (
            read(codec, p, table[ids], torch.float32)[:, head].flatten(0, 1)
            for p in (pages.key, pages.value)
        )
        seen = (ids.unsqueeze(-1) * BLOCK_TOKENS + torch.arange(128, device="cuda")) < visible
        q = w.q[row].float().view(KV_HEADS, -1, DIM)[head]
        scores = (q @ k.T * DIM**-0.5).masked_fill(~seen.flatten(), -torch.inf)
        outs.append(scores.softmax(-1) @ v)
    return torch.cat(outs)


def samples_us(launch: Callable[[int], None], launches: int, replays: int = 20) -> list[float]:
    """Microseconds a launch, one sample a replay of a CUDA graph of `launches`."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    times = []
    for i in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1e3 / launches)
    return times


def read_bandwidth() -> float:
    """Bytes a second of summing 8 GB, the median."""
    data = torch.randn(1 << 31, device="cuda")
    times = sorted(samples_us(lambda _: data.sum(), 1))
    return data.nbytes / times[len(times) // 2] * 1e6


def measure(
    num_pages: int, layers: list[LayerPages], requests: int, rows_each: int
) -> tuple[list[float], float, tuple[int, int]]:
    """Samples in microseconds, relative L2 error of some rows, splits and groups."""
    generator = torch.Generator("cuda").manual_seed(requests)
    sets = [work(num_pages, requests, rows_each, generator) for _ in range(2)]
    stored, pairs = layers[0].key.format.name, requests * rows_each * KV_HEADS
    shares = hopper.shares_for(pairs, TOPK, stored, MULTIPROCESSORS)

    def launch(i: int) -> None:
        w = sets[i % 2]
        hopper.attend(w.q, w.ids, w.batch, layers[i % LAYERS], w.out, *shares)

    w, checked = sets[0], sorted({0, w_last := requests * rows_each - 1, w_last // 2})
    w.out.fill_(float("nan"))
    launch(0)
    wrong = max(error(w.out[r].float(), plain(w, layers[0], r)) for r in checked)
    if not wrong <= TOLERANCE:
        raise SystemExit(f"{requests} x {rows_each}: relative error {wrong}, no time is reported")
    return samples_us(launch, LAYERS if requests * rows_each <= 64 else 20), wrong, shares


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    here = Path(__file__).parent
    parser.add_argument("--out", type=Path, default=here / "h200-sparse-decode.jsonl")
    parser.add_argument("--format", choices=("nvfp4", "fp8", "bf16"), default="nvfp4")
    parser.add_argument("--only", metavar="REQUESTSxROWS")
    parser.add_argument("--commit", default=commit())
    args = parser.parse_args(arguments)
    out, kv = args.out, FORMATS[args.format]
    bandwidth = read_bandwidth()
    rows, layers = pool(kv)
    on = {**machine(torch.get_num_threads()), "gpu": torch.cuda.get_device_name()}
    records = []
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s")
    for requests, rows_each in SIZES:
        if args.only and args.only != f"{requests}x{rows_each}":
            continue
        times, wrong, (splits, groups) = measure(rows.shape[0], layers, requests, rows_each)
        num_rows = requests * rows_each
        num_bytes = num_rows * TOPK * BLOCK_TOKENS * KV_HEADS * 2 * kv.nbytes(DIM)
        record = Record(
            level="kernel",
            what="sparse_attention decode",
            unit="us",
            samples=tuple(times),
            workload={
                "requests": requests,
                "rows_each": rows_each,
                "kv_len": min(rows.shape[0] // requests, 256) * BLOCK_TOKENS,
                "heads": HEADS,
                "kv_heads": KV_HEADS,
                "head_dim": DIM,
                "topk_blocks": TOPK,
            },
            conditions={
                "formats": {"kv": kv.name},
                "parallel": {"plan": "tp1", "devices": 1},
                "acceptance": {"kind": "none"},
                "cache_state": "K and V not in L2",
                "concurrency": requests,
                "latency_objective": None,
                "page_row_bytes": layout_of(kv).row_bytes,
                "selection": "at random, the current block among it; pages at random",
                "timing": "CUDA graph of launches on one layer after another; programmatic "
                "dependent launch",
                "splits": splits,
                "groups": groups,
                "num_bytes": num_bytes,
                "relative_l2_error": wrong,
                "read_bandwidth_bytes_per_s": bandwidth,
            },
            machine=on,
            software=software(),
            commit=args.commit,
        )
        records.append(record)
        floor = num_bytes / bandwidth * 1e6
        print(
            f"{kv.name} {requests:4} x {rows_each}: {record.median:7.1f} us, floor {floor:6.1f}, "
            f"{num_bytes / record.median / 1e6:5.2f} TB/s, "
            f"splits {splits}, groups {groups}, error {wrong:.1e}"
        )
    append(out, records)


if __name__ == "__main__":
    main()
