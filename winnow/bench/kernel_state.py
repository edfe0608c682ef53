"""What the workloads of `winnow bench kernels` share: pages, weights, selections on the device, and
what a workload that is ready looks like.

Owns memory. Everything is made when first asked for and kept, so that one run serves all ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from winnow.ops.paged import LayerPages, Paged, layer_pages
from winnow.ops.table import Kernels
from winnow.ops.weights import (
    MlpWeights,
    MoeWeights,
    Mxfp8Weight,
    Nvfp4Weight,
    Weight,
)
from winnow.spec.formats import FORMATS, NVFP4
from winnow.spec.model import BLOCK_TOKENS, ModelSpec
from winnow.spec.page import RowLayout

L2_BYTES = 60 << 20
"""At least the cache of the GPUs that are measured: inputs rotate through twice as much."""
_LAYERS = 4
_PAGES = 33_280
_MAX_SETS = 64
_SLICE = 512
"""Pages that are filled at a time."""


BF16_TOLERANCE = 2.0**-8
"""Relative L2 error of outputs rounded to bf16."""
NEAR_TIE = 2.0**-18
"""Relative difference of two scores that fp32 sums in another order may swap."""
CALLS = 20
"""At least about so many in a graph: starting one costs a call little then."""
FEW_ROWS = 256
"""Beyond which a call is long enough by itself."""


@dataclass(frozen=True)
class Checked:
    """The error of a workload's sample against plain arithmetic; `note` counts near ties."""

    error: float
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Ready:
    """A workload on the device: calls to be timed in turn, what one call must move and do on
    average, and the check that comes first."""

    calls: Sequence[Callable[[], Any]]
    check: Callable[[], Checked]
    num_bytes: int
    num_flops: int = 0


@dataclass
class State:
    """Page rows of a few layers in the given formats, and weights, on the current GPU."""

    spec: ModelSpec
    kv_format: str
    index_format: str
    _experts: MoeWeights | None = None

    @cached_property
    def layers(self) -> list[LayerPages]:
        """Layers over the same pages; values of moderate size in every slot."""
        spec = self.spec.with_layers(_LAYERS)
        layout = RowLayout.of(spec, FORMATS[self.kv_format], FORMATS[self.index_format])
        rows = torch.empty(_PAGES, layout.row_bytes, dtype=torch.uint8, device="cuda")
        layers = [layer_pages(rows, layout, layer) for layer in range(_LAYERS)]
        for layer in layers:
            for part in (layer.key, layer.value, layer.index):
                if part is not None:
                    _fill(part)
        return layers

    @property
    def token_bytes(self) -> int:
        """Of one token's K, V and index key in one layer."""
        spec = self.spec
        kv = FORMATS[self.kv_format].nbytes(2 * spec.num_kv_heads * spec.head_dim)
        return kv + FORMATS[self.index_format].nbytes(spec.index_dim)

    def page_sets(self, count: int) -> Iterator[Tensor]:
        """Disjoint sets of `count` page ids in random order, at most as many as are of use."""
        assert count <= _PAGES, f"{count} pages of {_PAGES}"
        pages = torch.randperm(_PAGES, device="cuda")
        for i in range(min(_PAGES // count, _MAX_SETS)):
            yield pages[i * count : (i + 1) * count]

    def experts(self, kernels: Kernels) -> MoeWeights:
        """One layer's experts as the backend reads them."""
        if self._experts is None:
            self._experts = kernels.prepare(_experts(self.spec), self.spec, torch.bfloat16)
        return self._experts

    def prepare_matrix(self, kernels: Kernels, weight: Weight) -> Weight:
        """`weight` as the backend's `linear` reads it; what was given is used up."""
        pair = MlpWeights(weight, mxfp8(16, 128))
        return kernels.prepare(pair, self.spec, torch.bfloat16).gate_up


def spread(
    call: Callable[[Any, Any], Callable[[], Any]], batches: list[Any], layers: list[Any], least: int
) -> list[Callable[[], Any]]:
    """One call for each batch and layer, in turn, again until there are `least`."""
    calls = [call(batch, layer) for batch in batches for layer in layers]
    return calls * -(-least // len(calls))


def sampled(rows: int) -> tuple[int, ...]:
    """The rows whose results are compared: the first, the last and two between."""
    return tuple(sorted({0, rows // 3, rows * 2 // 3, rows - 1}))


def selections(positions: Tensor, kv_heads: int, topk: int, clustered: bool) -> Tensor:
    """Ids as `select_blocks` gives them, int32 [rows, kv_heads, topk]: blocks of each row's past
    at random; clustered: 128 rows after one another choose among the same 24."""
    current = positions // BLOCK_TOKENS
    blocks = int(current.max()) + 1
    rows, device = positions.shape[0], positions.device
    groups = -(-rows // BLOCK_TOKENS)
    favour = torch.rand(groups, kv_heads, blocks, device=device)
    if clustered:
        keep = favour.topk(min(24, blocks), -1).indices
        favour.zero_().scatter_(-1, keep, 1.0)
        rank = favour.repeat_interleave(BLOCK_TOKENS, 0)[:rows]
        rank = rank + torch.rand(rows, kv_heads, blocks, device=device)
    else:
        rank = torch.rand(rows, kv_heads, blocks, device=device)
    ids = torch.arange(blocks, device=device)
    rank = rank.masked_fill(ids >= current[:, None, None], -1.0)
    rank.scatter_(-1, current[:, None, None].expand(-1, kv_heads, 1), 9.0)
    best = rank.topk(min(topk, blocks), -1)
    found = best.indices.masked_fill(best.values < 0, blocks).sort(-1).values
    found = found.masked_fill(found == blocks, -1).int()
    return torch.nn.functional.pad(found, (0, topk - found.shape[-1]), value=-1).contiguous()


def mxfp8(n: int, k: int) -> Mxfp8Weight:
    """A random matrix [n, k] of values of about 1 / sqrt(k)."""
    codes = torch.randint(256, (n, k), dtype=torch.uint8, device="cuda")
    codes.masked_fill_((codes & 0x7F) > 0x40, 0x38)
    step = round(torch.log2(torch.tensor(k**-0.5)).item())
    scales = torch.full((n, k // 32), 127 + step, dtype=torch.uint8, device="cuda")
    return Mxfp8Weight(codes.view(torch.float8_e4m3fn), scales)


def _nvfp4(*shape: int) -> Nvfp4Weight:
    """A stack of random matrices [..., N, K] of values of about 1 / sqrt(K)."""
    *stack, n, k = shape
    codes = torch.randint(256, (*stack, n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x30, 0x40, (*stack, n, k // 16), dtype=torch.uint8, device="cuda")
    whole = torch.full((*stack, n), 0.4 * k**-0.5, device="cuda")
    return Nvfp4Weight(codes, scales.view(torch.float8_e4m3fn), whole)


def _experts(spec: ModelSpec) -> MoeWeights:
    experts, width, hidden = spec.num_experts, spec.expert_width, spec.hidden_size
    return MoeWeights(
        router=torch.randn(experts, hidden, device="cuda") * hidden**-0.5,
        router_bias=torch.randn(experts, device="cuda") * 0.01,
        gate_up=_nvfp4(experts, 2 * width, hidden),
        down=_nvfp4(experts, hidden, width),
        shared=MlpWeights(mxfp8(2 * spec.shared_width, hidden), mxfp8(hidden, spec.shared_width)),
    )


def _fill(part: Paged) -> None:
    """Values of moderate size, never NaN."""
    for start in range(0, part.codes.shape[0], _SLICE):
        some = part.codes[start : start + _SLICE]
        if part.format is NVFP4:
            assert part.scales is not None
            some.copy_(torch.randint(256, some.shape, dtype=torch.uint8, device=some.device))
            scales = part.scales[start : start + _SLICE].view(torch.uint8)
            scales.copy_(
                torch.randint(0x28, 0x38, scales.shape, dtype=torch.uint8, device=some.device)
            )
        else:
            some.copy_(torch.randn(some.shape, device=some.device).to(some.dtype))
