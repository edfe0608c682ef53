"""Marlin's two grouped NVFP4 products, as vLLM calls them on Hopper: router, order of rows,
activation, weighted sum and shared expert left out, which favours the peer.

Its library comes compressed in the folder that `benchmarks/peers/fetch.py` filled.
"""

from __future__ import annotations

import importlib.util
import lzma
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from winnow.spec.model import ModelSpec

FOLDER = "marlin"
_LIBRARY, _TYPES = "moe.xz", "scalar_type.py"
_TILES = (8, 16, 32, 48, 64)
_ROUTINGS = 4


class Marlin:
    """The operators of the library in `folder`; registered with torch once a process."""

    def __init__(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory() as work:
            library = Path(work) / "moe.so"
            library.write_bytes(lzma.decompress((folder / _LIBRARY).read_bytes()))
            torch.ops.load_library(str(library))
        spec = importlib.util.spec_from_file_location("scalar_type", folder / _TYPES)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Its dataclasses look their module up by name.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        self.fp4: int = module.scalar_types.float4_e2m1f.id

    def calls(self, spec: ModelSpec, rows: int) -> Sequence[Callable[[], Any]]:
        """Both products of `rows` rows for four random routings, over one layer's weights (its
        4.1 GB are larger than any cache)."""
        experts, taken = spec.num_experts, spec.experts_per_token
        hidden, width = spec.hidden_size, spec.expert_width
        ops = torch.ops._moe_C
        tile = next((t for t in _TILES if rows * taken / experts / t < 0.9), _TILES[-1])
        up, down = _weights(experts, hidden, 2 * width), _weights(experts, width, hidden)
        room = torch.zeros(
            4 * torch.cuda.get_device_properties(0).multi_processor_count,
            dtype=torch.int32, device="cuda",
        )  # fmt: skip
        pairs = rows * taken
        x = torch.randn(rows, hidden, device="cuda").bfloat16()
        between = torch.randn(pairs, width, device="cuda").bfloat16()
        first = torch.empty(pairs, 2 * width, device="cuda", dtype=torch.bfloat16)
        second = torch.empty(pairs, hidden, device="cuda", dtype=torch.bfloat16)
        fixed = (True, False, True, False, -1, -1, -1)

        def step(order: Tensor, blocks: Tensor, count: Tensor, share: Tensor) -> None:
            placed = (room, order, blocks, count, share, tile)
            ops.moe_wna16_marlin_gemm(
                x, first, up[0], None, up[1], None, up[2], None, None, None, *placed,
                taken, False, self.fp4, rows, 2 * width, hidden, *fixed,
            )  # fmt: skip
            ops.moe_wna16_marlin_gemm(
                between, second, down[0], None, down[1], None, down[2], None, None, None, *placed,
                1, True, self.fp4, pairs, hidden, width, *fixed,
            )  # fmt: skip

        return [partial(step, *_order(rows, taken, experts, tile)) for _ in range(_ROUTINGS)]


def _weights(experts: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes in Marlin's order, scales, and one global scale an expert."""
    codes = torch.randint(
        -(1 << 31), (1 << 31) - 1, (experts, k // 16, n * 2), dtype=torch.int32, device="cuda"
    )
    scales = (torch.rand(experts, k // 16, n, device="cuda") + 0.5).to(torch.float8_e4m3fn)
    return codes, scales, torch.full((experts,), 1e-3, device="cuda")


def _order(rows: int, taken: int, experts: int, tile: int) -> tuple[Tensor, ...]:
    chosen = torch.rand(rows, experts, device="cuda").topk(taken).indices.int()
    most = min(rows * taken * tile, rows * taken + experts * (tile - 1))
    blocks = -(-most // tile)
    order = torch.empty(blocks * tile, dtype=torch.int32, device="cuda")
    of_block = torch.empty(blocks, dtype=torch.int32, device="cuda")
    count = torch.empty(1, dtype=torch.int32, device="cuda")
    torch.ops._moe_C.moe_align_block_size(chosen, experts, tile, order, of_block, count, None)
    return order, of_block, count, torch.rand(rows, taken, device="cuda")
