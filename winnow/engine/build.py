"""The composition root: from a user's words to a running engine. The only place that chooses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from winnow.config import EngineConfig, SamplingParams
from winnow.core.scheduler import Scheduler
from winnow.engine.engine import Engine
from winnow.engine.graphs import CudaCapture, StepGraphs
from winnow.engine.memory import count_pages
from winnow.engine.runner import Runner
from winnow.engine.shapes import table_widths
from winnow.engine.storage import PageStorage
from winnow.engine.text import Tokenizer, load_tokenizer
from winnow.errors import CapacityError, CheckpointError, RequestError, UnsupportedError
from winnow.model.checkpoint import (
    load_checkpoint,
    random_weights,
    read_generation_config,
    read_spec,
)
from winnow.model.transformer import Transformer
from winnow.model.weights import ModelWeights, Prepare
from winnow.ops import native
from winnow.ops.paged import CacheScales
from winnow.ops.table import BACKENDS, Kernels, kernels, why_not
from winnow.spec.capacity import WEIGHT_FORMATS
from winnow.spec.embedded import checkpoint_path
from winnow.spec.formats import BF16, FP8, FP32, NVFP4, Format, cache_format
from winnow.spec.model import BLOCK_TOKENS, ModelSpec
from winnow.spec.page import RowLayout
from winnow.spec.presets import PRESETS, preset

log = logging.getLogger(__name__)

_DTYPES: dict[str, tuple[torch.dtype, Format]] = {
    "float32": (torch.float32, FP32),
    "bfloat16": (torch.bfloat16, BF16),
}


def build_engine(
    model: str,
    config: EngineConfig | None = None,
    *,
    random: bool = False,
    num_layers: int | None = None,
    progress: bool = True,
    report: Callable[[int, int], None] | None = None,
) -> Engine:
    """An engine for a checkpoint directory, or for a preset with random weights.

    `num_layers` cuts a preset to its last layers. `progress` shows a bar on a terminal; `report`
    gets the bytes of weights that were read, and their total, again and again. Raises
    CheckpointError, UnsupportedError or CapacityError; nothing is left half built.
    """
    config = config or EngineConfig()
    table = kernels(_backend(config))
    if random:
        spec = preset(model) if num_layers is None else preset(model).with_layers(num_layers)
        tokenizer, default_params = None, SamplingParams()
    else:
        spec, tokenizer, default_params = _open(model, num_layers)
    for note in spec.notes:
        log.warning("%s", note)
    dtype, model_format = _DTYPES[config.dtype or _own_dtype(config, spec)]
    device = _prepare(config)
    if table.backend == "cpu":
        # Built now, where it takes the time of no request and where a failure ends no server.
        native.library()
    prepare = partial(table.prepare, spec=spec, dtype=dtype)
    if random:
        weights = _random_weights(spec, dtype, model_format, device, prepare)
    else:
        path = checkpoint_path(model)
        weights = load_checkpoint(path, spec, dtype, progress, device, report, prepare)
    return assemble(spec, weights, tokenizer, config, table, model_format, default_params)


def assemble(
    spec: ModelSpec,
    weights: ModelWeights,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    table: Kernels,
    model_format: Format,
    default_params: SamplingParams,
) -> Engine:
    """An engine over weights that are in memory already."""
    layout = RowLayout.of(
        spec,
        cache_format(config.kv_format, model_format),
        cache_format(config.index_format, model_format),
    )
    max_model_len = config.max_model_len or spec.max_positions
    if max_model_len > spec.max_positions:
        raise UnsupportedError(
            f"max_model_len is {max_model_len}, the model has {spec.max_positions} positions: "
            f"lower it to {spec.max_positions}"
        )
    model = Transformer(spec, weights, table)
    num_pages = count_pages(config, model, layout, max_model_len)
    _say_index_scale(layout.index_format)
    scales = _kv_scales(layout.kv_format, weights.cache_scales)
    storage = PageStorage(layout, num_pages, scales, config.device)
    scheduler = Scheduler(
        num_pages=num_pages,
        max_step_tokens=config.step_tokens,
        max_running=config.max_running,
        prefix_caching=config.prefix_caching,
    )
    blocks = min(-(-max_model_len // BLOCK_TOKENS), num_pages - 1)
    widths = table_widths(blocks) if storage.rows.is_cuda else ()
    runner = Runner(model, storage, _graphs(config, model, storage, blocks), widths)
    log.info(
        "backend %s, KV %s, index %s, %d pages of %d bytes",
        table.backend, layout.kv_format.name, layout.index_format.name, num_pages, layout.row_bytes,
    )  # fmt: skip
    engine = Engine(spec, runner, scheduler, tokenizer, max_model_len, default_params)
    _check_length(config, engine)
    return engine


def _check_length(config: EngineConfig, engine: Engine) -> None:
    """Say where the cache is shorter than the model; CapacityError where the length was asked for.

    Left out, it is as long as both allow.
    """
    held, length = engine.max_request_tokens, engine.max_model_len
    pages = engine.runner.storage.num_pages
    if held == length:
        return
    needed = -(-length // BLOCK_TOKENS) + 1
    if config.max_model_len is not None:
        raise CapacityError(
            f"max_model_len is {length}, the cache of {pages} pages holds "
            f"{held} tokens: lower it to {held}, or start with num_pages (--num-pages) {needed}"
        )
    log.info(
        "the model takes %d tokens, the cache holds %d: a request may have %d, with "
        "num_pages (--num-pages) %d all of them", length, held, held, needed,
    )  # fmt: skip


def _graphs(
    config: EngineConfig, model: Transformer, storage: PageStorage, blocks: int
) -> StepGraphs | None:
    """Captures of decode steps of up to `blocks` blocks, on a GPU and unless not wanted."""
    if not (config.cuda_graphs and storage.rows.is_cuda):
        return None
    graphs = StepGraphs(model, storage, CudaCapture(), config.max_running, blocks)
    log.info(
        "decode steps are captured at first use, padded to one of %s requests and %s blocks",
        ", ".join(map(str, graphs.sizes)), ", ".join(map(str, graphs.widths)),
    )  # fmt: skip
    return graphs


def _backend(config: EngineConfig) -> str:
    """The backend asked for, or the device's own: on a GPU, hopper where that can serve."""
    own = ("cpu", "reference") if config.device == "cpu" else ("hopper", "cuda")
    if config.backend is None:
        if config.device == "cpu":
            return "cpu"
        reason = why_not("hopper")
        if reason is not None:
            log.info("backend cuda, since %s", reason)
        return "hopper" if reason is None else "cuda"
    if config.backend in BACKENDS and config.backend not in own:
        raise UnsupportedError(
            f"backend {config.backend} does not run on device {config.device}: leave one out"
        )
    return config.backend


def _own_dtype(config: EngineConfig, spec: ModelSpec) -> str:
    """The model's dtype on a GPU; fp32 on a CPU, where it alone makes a request's tokens not depend
    on what is served beside it, and where most processors multiply nothing narrower."""
    return "float32" if config.device == "cpu" else spec.dtype


def _prepare(config: EngineConfig) -> torch.device:
    """The device, made the one that kernels are launched on."""
    device = torch.device(config.device)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UnsupportedError(
                f"device {config.device} was asked for, there are {count}: use cuda:{count - 1}"
            )
        torch.cuda.set_device(device.index or 0)
        # The contract of `linear` wants sums in fp32.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return device


def _open(model: str, num_layers: int | None) -> tuple[ModelSpec, Tokenizer | None, SamplingParams]:
    path = checkpoint_path(model)
    if not path.is_dir():
        known = f"demo, or a preset with random_weights (--random-weights) ({', '.join(PRESETS)})"
        raise UnsupportedError(f"{model!r} is no directory: give a checkpoint's directory, {known}")
    if num_layers is not None:
        raise UnsupportedError(
            "num_layers (--layers) cuts presets only: a checkpoint is served whole"
        )
    return read_spec(path), load_tokenizer(path), _default_params(path)


def _default_params(directory: Path) -> SamplingParams:
    """How a checkpoint wants to be sampled where a request says nothing."""
    given = read_generation_config(directory).sampling
    try:
        params = SamplingParams.from_options(given)
    except RequestError as error:
        raise CheckpointError(f"{directory / 'generation_config.json'}: {error}") from error
    if given:
        words = ", ".join(f"{name} {value}" for name, value in given.items())
        log.info("sampled with %s unless a request says otherwise", words)
    return params


def _random_weights(
    spec: ModelSpec,
    dtype: torch.dtype,
    plain: Format,
    device: torch.device,
    prepare: Prepare,
) -> ModelWeights:
    """Random weights in the formats of the preset's checkpoint."""
    experts, linear = WEIGHT_FORMATS[spec.quantization]
    held = ((experts or plain).name, (linear or plain).name)
    return random_weights(spec, dtype, *held, device=device, prepare=prepare)


def _kv_scales(
    kv_format: Format, stored: tuple[CacheScales, ...] | None
) -> tuple[CacheScales, ...] | None:
    """The scales that K and V are stored with, None for 1.0 throughout; says which they are.

    A checkpoint's scales put its largest values at FP8's 448. The group scales of NVFP4 reach six
    times as far on their own, and what is not quantised needs none.
    """
    if kv_format is NVFP4:
        log.info("KV cache in nvfp4 with a tensor scale of 1.0, as its groups have their own")
    if kv_format is not FP8:
        return None
    none = "a tensor scale of 1.0, as the checkpoint has none"
    # An assumption about values nobody has seen is worth a warning.
    level = logging.INFO if stored else logging.WARNING
    log.log(
        level, "KV cache in fp8 with %s", "tensor scales from the checkpoint" if stored else none
    )
    return stored


def _say_index_scale(index_format: Format) -> None:
    """A scale that was assumed is said."""
    if index_format.code_bits < 16:
        level = logging.INFO if index_format.group else logging.WARNING
        log.log(level, "index cache in %s with a tensor scale of 1.0", index_format.name)
