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
from winnow.spec.formats import NVFP4
from winnow.spec.model import BLOCK_TOKENS

ROW_BYTES = 1_822_720
LAYERS = (0, 17, 38, 59)
PIECE_BYTES = NVFP4.nbytes(BLOCK_TOKENS * 128)
CODE_BYTES = NVFP4.code_bytes(BLOCK_TOKENS * 128)
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

    @property
    def num_bytes(self) -> int:
        """Index keys of the blocks that must be scored: each once, whatever the rows."""
        return self.requests * ((self.tokens - 1) // BLOCK_TOKENS) * PIECE_BYTES


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


def index_keys() -> list[Paged]:
    """Four layers of every page: random codes under scales of 1/4 to 15/8."""
    rows = torch.empty(PAGES, ROW_BYTES, dtype=torch.uint8, device="cuda")
    layers = []
    for layer in LAYERS:
        start = layer * PIECE_BYTES
        codes = rows[:, start : start + CODE_BYTES]
        scales = rows[:, start + CODE_BYTES : start + PIECE_BYTES]
        codes.copy_(torch.randint(256, codes.shape, dtype=torch.uint8, device="cuda"))
        scales.copy_(torch.randint(0x28, 0x40, scales.shape, dtype=torch.uint8, device="cuda"))

        def view(part: Tensor, width: int) -> Tensor:
            shape = (PAGES, 1, BLOCK_TOKENS, width)
            return part.as_strided(shape, (ROW_BYTES, 0, width, 1), part.storage_offset())

        layers.append(
            Paged(
                NVFP4,
                view(codes, DIM // 2),
                view(scales, DIM // NVFP4.group).view(torch.float8_e4m3fn),
            )
        )
    return layers


def batches(work: Workload) -> list[Batch]:
    """Batches over disjoint pages, as many as there are pages or L2 asks for."""
    blocks = -(-work.tokens // BLOCK_TOKENS)
    pages = torch.randperm(PAGES, device="cuda")
    own = work.requests * blocks
    wanted = -(-2 * L2_BYTES // (own * PIECE_BYTES * len(LAYERS)))
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
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    layers = index_keys()
    device = torch.cuda.get_device_properties(0)
    gpu = {"gpu": device.name, "multiprocessors": device.multi_processor_count}
    records = []
    print(f"{device.name}: torch.sum reads {bandwidth:.2f} TB/s")
    print("requests x tokens, rows, queries: us, floor us, TB/s, share of the read bandwidth")
    for work in WORKLOADS:
        if args.only and args.only != f"{work.requests}x{work.tokens}":
            continue
        queries, made = query_rows(work), batches(work)
        differ = check(queries, layers[0], made[0])
        samples = timed(calls_of(work, layers, queries, made))
        us, floor = median(samples), work.num_bytes / bandwidth / 1e6
        dtype = str(work.dtype).removeprefix("torch.")
        print(
            f"{work.requests} x {work.tokens}, {work.rows}, {dtype}{', L2 warm' * work.warm}: "
            f"{us:.1f}, {floor:.1f}, {work.num_bytes / us / 1e6:.2f}, {floor / us:.0%}"
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
                    "num_bytes": work.num_bytes,
                },
                conditions={
                    "formats": {"index": "nvfp4", "query": dtype},
                    "parallel": {"plan": "tp4", "devices": 1},
                    "acceptance": {"kind": "none"},
                    "latency_objective": None,
                    "concurrency": work.requests,
                    "cache_state": "keys in L2" if work.warm else "keys not in L2",
                    "page_row_bytes": ROW_BYTES,
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
