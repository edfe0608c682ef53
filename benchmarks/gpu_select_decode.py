"""The indexer's decode kernels on a Hopper GPU: checked against fp64 scores, then timed.

MiniMax-M3.1's geometry in rows of 1,822,720 bytes (four tensor-parallel ranks, NVFP4 KV and index
keys), pages in random order. A time is one replay of a CUDA graph over the calls in it; calls
rotate over layers and pages until the keys between two uses of a page pass the L2 cache twice,
or, where a record says so, repeat one call so that its keys stay in it. Refuses to time a
workload whose selection is wrong. Appends records and prints a table.

    python benchmarks/gpu_select_decode.py [--out FILE] [--commit NAME] [--only REQUESTSxTOKENS]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from winnow.bench.machine import commit, machine, software
from winnow.bench.record import Record, append
from winnow.ops.batch import Batch
from winnow.ops.codec import reference as codec
from winnow.ops.paged import Paged, read
from winnow.ops.select_blocks.hopper import select_blocks
from winnow.spec.formats import BF16, FORMATS, FP8, NVFP4, Format
from winnow.spec.model import BLOCK_TOKENS

ROW_BYTES = {NVFP4: 1_822_720, FP8: 2_949_120, BF16: 2_949_120}
"""Rows of bf16 would be twice as long, and 33,280 of them more than a GPU holds."""
LAYERS = (0, 17, 38, 59)
PAGES = 33_280
HEADS, DIM, TOPK = 4, 128, 16
L2_BYTES = 60 << 20
REPLAYS = 30
CALLS = 20
"""At least about so many a graph, so that starting the graph costs a call little."""
NEAR_TIE = 2.0**-18
"""Relative difference of two scores up to which fp32 sums in another order may swap them."""


@dataclass(frozen=True)
class Workload:
    requests: int
    tokens: int
    rows: int = 1
    dtype: torch.dtype = torch.bfloat16
    warm: bool = False

    def num_bytes(self, stored: Format) -> int:
        """Index keys of the blocks that must be scored: each once, whatever the rows."""
        return self.requests * ((self.tokens - 1) // BLOCK_TOKENS) * piece_bytes(stored)


def piece_bytes(stored: Format) -> int:
    """One layer's index keys of a page."""
    return stored.nbytes(BLOCK_TOKENS * DIM)


SINGLE = tuple(Workload(1, n) for n in (8192, 32_768, 131_072, 524_288))
WORKLOADS = (
    *SINGLE,
    *(Workload(1, n, warm=True) for n in (8192, 32_768, 131_072, 524_288)),
    *(Workload(8, n) for n in (32_768, 131_072)),
    *(Workload(32, n) for n in (8192, 32_768, 131_072)),
    Workload(64, 65_536),
    Workload(256, 16_384),
    *(Workload(32, 131_072, rows) for rows in (2, 4, 8)),
    Workload(32, 131_072, dtype=torch.float32),
)


def index_keys(stored: Format) -> list[Paged]:
    """Four layers of every page: random codes, NVFP4's under scales of 1/4 to 15/8."""
    row_bytes = ROW_BYTES[stored]
    rows = torch.empty(PAGES, row_bytes, dtype=torch.uint8, device="cuda")
    code_bytes = stored.code_bytes(DIM)
    dtype = {NVFP4: torch.uint8, FP8: torch.float8_e4m3fn, BF16: torch.bfloat16}[stored]
    layers = []
    for layer in LAYERS:
        start = layer * piece_bytes(stored)

        def view(offset: int, width: int, start: int = start) -> Tensor:
            shape = (PAGES, 1, BLOCK_TOKENS, width)
            return rows.as_strided(shape, (row_bytes, 0, width, 1), start + offset)

        codes = view(0, code_bytes)
        scales = None
        if stored is BF16:
            codes.view(dtype).normal_()
        else:
            codes.copy_(torch.randint(256, codes.shape, dtype=torch.uint8, device="cuda"))
        if stored is FP8:
            codes.bitwise_and_(0xBF)
        if stored is NVFP4:
            scales = view(BLOCK_TOKENS * code_bytes, DIM // NVFP4.group)
            scales.copy_(torch.randint(0x28, 0x40, scales.shape, dtype=torch.uint8, device="cuda"))
            scales = scales.view(torch.float8_e4m3fn)
        layers.append(Paged(stored, codes.view(dtype), scales))
    return layers


def batches(work: Workload, stored: Format) -> list[Batch]:
    """Batches over disjoint pages, as many as there are pages or L2 asks for."""
    blocks = -(-work.tokens // BLOCK_TOKENS)
    pages = torch.randperm(PAGES, device="cuda")
    own = work.requests * blocks
    wanted = -(-2 * L2_BYTES // (own * piece_bytes(stored) * len(LAYERS)))
    count = 1 if work.warm else max(1, min(PAGES // own, wanted))
    rows = torch.arange(work.requests * work.rows, device="cuda")
    made = []
    for i in range(count):
        made.append(
            Batch(
                positions=work.tokens - work.rows + rows % work.rows,
                row_request=rows // work.rows,
                row_starts=torch.arange(work.requests + 1, device="cuda") * work.rows,
                kv_lens=torch.full((work.requests,), work.tokens, device="cuda"),
                block_tables=pages[i * own : (i + 1) * own].view(work.requests, blocks),
            )
        )
    return made


def check(index_q: Tensor, index: Paged, batch: Batch) -> int:
    """Selections that differ from those by fp64 scores; they must be ties but for rounding."""
    ids = torch.full((batch.num_rows, HEADS, TOPK), -7, dtype=torch.int32, device="cuda")
    ids.copy_(select_blocks(index_q, index, batch, TOPK))
    differ = 0
    for request in range(batch.num_requests):
        keys = read(codec, index, batch.block_tables[request], torch.float32).reshape(-1, DIM)
        for row in batch.rows(request):
            current = int(batch.positions[row]) // BLOCK_TOKENS
            products = index_q[row].double() @ keys[: current * BLOCK_TOKENS].double().T
            scores = products.view(HEADS, current, BLOCK_TOKENS).amax(-1)
            best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : TOPK - 1]
            for head in range(HEADS):
                want = [*sorted(best[head].tolist()), current]
                got = ids[row, head].tolist()
                if got == want:
                    continue
                if got != sorted(set(got)) or got[-1] != current or got[0] < 0:
                    raise AssertionError(f"row {row}, head {head}: {got} against {want}")
                pairs = zip(set(got) - set(want), set(want) - set(got), strict=True)
                for ours, theirs in pairs:
                    a, b = float(scores[head, ours]), float(scores[head, theirs])
                    print(f"row {row}, head {head}: block {ours} {a!r} for {theirs} {b!r}")
                    if abs(a - b) > NEAR_TIE * abs(b):
                        raise AssertionError("the difference is more than rounding")
                    differ += 1
    return differ


def timed(calls: list[Callable[[], Any]], replays: int = REPLAYS) -> tuple[float, ...]:
    """Microseconds of one call: replays of a graph of all calls, over their number."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    samples = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(round(start.elapsed_time(end) * 1e3 / len(calls), 3))
    return tuple(samples)


def read_bandwidth() -> float:
    """TB/s at which torch sums 2 GiB of fp32, what a kernel may hope for."""
    data = torch.empty(1 << 29, device="cuda").normal_()
    return data.nbytes / median(timed([lambda: torch.sum(data)] * 2)) / 1e6


def calls_of(
    work: Workload, layers: list[Paged], queries: Tensor, made: list[Batch]
) -> list[Callable[[], Tensor]]:
    """One call for each batch and layer, in turn; or one alone where L2 shall hold the keys."""

    def call(index: Paged, batch: Batch) -> Callable[[], Tensor]:
        return lambda: select_blocks(queries, index, batch, TOPK)

    if work.warm:
        return [call(layers[0], made[0])] * CALLS
    calls = [call(index, batch) for batch in made for index in layers]
    return calls * max(1, CALLS // len(calls))


def query_rows(work: Workload) -> Tensor:
    return torch.randn(work.requests * work.rows, HEADS, DIM, device="cuda").to(work.dtype)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=str(Path(__file__).with_name("h200-select-decode.jsonl")))
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--only", metavar="REQUESTSxTOKENS")
    parser.add_argument("--format", choices=("nvfp4", "fp8", "bf16"), default="nvfp4")
    args = parser.parse_args()
    stored = FORMATS[args.format]
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    layers = index_keys(stored)
    device = torch.cuda.get_device_properties(0)
    gpu = {"gpu": device.name, "multiprocessors": device.multi_processor_count}
    records = []
    print(f"{device.name}: torch.sum reads {bandwidth:.2f} TB/s")
    print("requests x tokens, rows, queries: us, floor us, TB/s, share of the read bandwidth")
    for work in WORKLOADS:
        if args.only and args.only != f"{work.requests}x{work.tokens}":
            continue
        if stored is BF16 and work.dtype is torch.float32:
            continue
        queries, made = query_rows(work), batches(work, stored)
        differ = check(queries, layers[0], made[0])
        samples = timed(calls_of(work, layers, queries, made))
        num_bytes = work.num_bytes(stored)
        us, floor = median(samples), num_bytes / bandwidth / 1e6
        dtype = str(work.dtype).removeprefix("torch.")
        print(
            f"{work.requests} x {work.tokens}, {work.rows}, {dtype}{', L2 warm' * work.warm}: "
            f"{us:.1f}, {floor:.1f}, {num_bytes / us / 1e6:.2f}, {floor / us:.0%}"
            + f", {differ} near ties"
            * bool(differ),
            flush=True,
        )
        records.append(
            Record(
                level="kernel",
                what="select_blocks decode",
                unit="us",
                samples=samples,
                workload={
                    "requests": work.requests,
                    "tokens": work.tokens,
                    "rows_per_request": work.rows,
                    "index_heads": HEADS,
                    "index_dim": DIM,
                    "topk": TOPK,
                    "num_bytes": num_bytes,
                },
                conditions={
                    "formats": {"index": stored.name, "query": dtype},
                    "parallel": {"plan": "tp4", "devices": 1},
                    "acceptance": {"kind": "none"},
                    "latency_objective": None,
                    "concurrency": work.requests,
                    "cache_state": "keys in L2" if work.warm else "keys not in L2",
                    "page_row_bytes": ROW_BYTES[stored],
                    "page_order": "random",
                    "timing": "CUDA graph replay over its calls",
                    "read_tb_s": round(bandwidth, 3),
                    "near_ties_that_differ": differ,
                },
                machine=machine(1) | gpu,
                software=software() | {"cuda": str(torch.version.cuda)},
                commit=args.commit,
            )
        )
    append(Path(args.out), records)


if __name__ == "__main__":
    main()
