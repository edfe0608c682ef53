"""How many pages a device holds beside weights and the largest step. Allocates no pages to keep.

On a GPU the largest step is run before pages are counted, so that what steps need is known and not
guessed: then no step later asks for memory that the pages took. A CPU's memory gives way by itself.
"""

from __future__ import annotations

import gc
import logging

import torch

from winnow.config import EngineConfig
from winnow.core.plan import PlannedRows, StepPlan
from winnow.core.request import Request
from winnow.engine.graphs import CudaCapture, StepGraphs
from winnow.engine.storage import PageStorage
from winnow.errors import CapacityError
from winnow.model.checkpoint.random import free_memory_bytes
from winnow.model.transformer import Transformer
from winnow.model.weights import nbytes
from winnow.ops.batch import Batch
from winnow.ops.sample import SampleRow
from winnow.spec.memory import plan_memory
from winnow.spec.model import BLOCK_TOKENS
from winnow.spec.page import RowLayout

log = logging.getLogger(__name__)

CPU_FRACTION, GPU_FRACTION = 0.25, 0.9
"""Of what is free, as a laptop's other programs want the rest; of all that there is."""
_GRAPHS_BYTES = 512 << 20
"""For the launches of captured steps, which the driver keeps on the device, some megabytes each."""


def count_pages(
    config: EngineConfig, model: Transformer, layout: RowLayout, max_model_len: int
) -> int:
    """As many pages as asked for, else what fits; CapacityError where that is too little.

    Never more than `max_running` requests of the greatest length could hold.
    """
    device = torch.device(config.device)
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        free = _free_of_cached(device)
        step = _largest_step(config, model, layout, max_model_len)
        fraction = config.memory_fraction or GPU_FRACTION
        # What is not free is the weights', the driver's or another process's.
        held, available = total - free, int(total * fraction) - (total - free) - step
    else:
        total = available = free_memory_bytes(device)
        held = step = 0
        fraction = config.memory_fraction or CPU_FRACTION
    row_bytes = layout.row_bytes
    if config.num_pages is not None:
        if config.num_pages * row_bytes > available:
            raise CapacityError(
                f"{config.num_pages} pages of {row_bytes} bytes were asked for, {available} "
                f"bytes are free: lower num_pages (--num-pages) to {max(0, available // row_bytes)}"
            )
        return config.num_pages
    if config.cache_bytes is not None:
        if config.cache_bytes > available:
            raise CapacityError(
                f"a cache of {config.cache_bytes} bytes was asked for, {available} bytes are free: "
                "lower cache_bytes"
            )
        fitting = plan_memory(config.cache_bytes, 0, row_bytes, 1.0).num_pages
    else:
        fitting = plan_memory(total, held, row_bytes, fraction, step).num_pages
    if device.type == "cuda":
        weights = sum(nbytes(model.weights).values())
        planned = plan_memory(total, weights, row_bytes, fraction).num_pages
        log.info(
            "%.2f of %.2f GB are in use, %.2f GB of them weights; the largest step takes %.2f GB: "
            "%d pages fit, %d by weights and rows alone",
            held / 1e9, total / 1e9, weights / 1e9, step / 1e9, fitting, planned,
        )  # fmt: skip
    most = config.max_running * -(-max_model_len // BLOCK_TOKENS) + 1
    return min(fitting, most)


def _free_of_cached(device: torch.device) -> int:
    """Bytes free on a GPU once torch keeps none for later."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _largest_step(
    config: EngineConfig, model: Transformer, layout: RowLayout, max_model_len: int
) -> int:
    """Bytes that steps take on the GPU at most, by running the largest: one computed as it is, and
    one captured, since the two keep memory of their own."""
    device = torch.device(config.device)
    width = -(-max_model_len // BLOCK_TOKENS)

    def eager() -> None:
        storage = PageStorage(layout, 2, None, device)
        storage.rows.zero_()
        _run_eagerly(config, model, storage, width)

    def captured() -> StepGraphs:
        storage = PageStorage(layout, 2, None, device)
        storage.rows.zero_()
        return _captured(config, model, storage, width)

    try:
        before = _free_of_cached(device)
        eager()
        torch.cuda.synchronize(device)
        # What torch keeps for later is the most that the step had at once.
        spent = before - torch.cuda.mem_get_info(device)[0]
        if config.cuda_graphs:
            before = _free_of_cached(device)
            kept = captured()
            spent += before - _free_of_cached(device) + _GRAPHS_BYTES
            del kept
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"a step of {config.step_tokens} tokens and {config.max_running} requests does not "
            f"fit beside the weights: lower max_step_tokens (--max-step-tokens) or max_running "
            f"(--max-running) ({error})"
        ) from error
    _free_of_cached(device)
    return spent


def _run_eagerly(
    config: EngineConfig, model: Transformer, storage: PageStorage, width: int
) -> None:
    """A step of as many rows as there may be, the most of them sampled by rank. Which pages it
    reads makes no difference to memory: all are the same one."""
    rows = min(config.step_tokens, width * BLOCK_TOKENS)
    device = storage.rows.device
    sampled = min(rows, config.max_running)
    batch = Batch.of([0], [rows], [[1] * width]).to(device)
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    wanted = torch.arange(rows - sampled, rows, device=device)
    with torch.inference_mode():
        logits = model.forward(ids, batch, storage.layers, wanted)
        model.kernels.sample(logits, [SampleRow(seed=0, index=0, top_p=0.9)] * sampled)


def _captured(
    config: EngineConfig, model: Transformer, storage: PageStorage, width: int
) -> StepGraphs:
    graphs = StepGraphs(model, storage, CudaCapture(), config.max_running, width)
    shape = graphs.fitting(graphs.sizes[-1], 1, width)
    assert shape is not None
    request = Request("largest", prompt=(0,), max_tokens=1)
    row = PlannedRows("largest", start=0, count=1, pages=(1,), samples=True)
    with torch.inference_mode():
        graphs.fill(shape, StepPlan((row,)), {"largest": request})
        graphs.replay(shape, "ranked")
    return graphs
