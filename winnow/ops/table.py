"""Which function serves each op on a backend, and why a backend cannot serve here.

The only module that knows backends by name. `reference` is the definition, slow and plain; `cpu`,
with kernels in C++, is the default; `cuda`, in Triton, is for any NVIDIA GPU with bf16 tensor
cores; `hopper` is `cuda` with kernels in CUDA C++ for the cases that they take. A backend serves
all ops or says in one sentence why it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from typing import Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops.attention_inputs import AttentionInputs
from winnow.ops.batch import Batch
from winnow.ops.cuda_build import compiler as cuda_compiler
from winnow.ops.dense_attention import DenseAttention
from winnow.ops.linear import Head, Linear
from winnow.ops.mlp import Mlp
from winnow.ops.moe import Moe
from winnow.ops.native import compiler
from winnow.ops.norm import AddNorm, Norm
from winnow.ops.paged import LayerPages
from winnow.ops.sample import Sample
from winnow.ops.select_blocks import SelectBlocks
from winnow.ops.sparse_attention import SparseAttention
from winnow.ops.weights import AttentionWeights, MlpWeights, MoeWeights
from winnow.spec.model import ModelSpec

DEVICES = {"cpu": "cpu", "reference": "cpu", "cuda": "cuda", "hopper": "cuda"}
"""Where each backend's tensors lie."""
BACKENDS = tuple(DEVICES)

Insertion = Callable[
    [Tensor, Tensor | None, AttentionWeights, ModelSpec, tuple[Tensor, Tensor], Batch, LayerPages],
    tuple[Tensor, Tensor | None],
]
"""From the projections qkv and index, with the other arguments of `attention_inputs`."""

P = ParamSpec("P")
R = TypeVar("R")
Part = TypeVar("Part", AttentionWeights, MlpWeights, MoeWeights)


@dataclass(frozen=True)
class ByCase(Generic[P, R]):
    """An op served by `special` where `takes` says so of its arguments, else by `general`.

    The choice is made of formats and shapes, before anything runs; `when` says it in words.
    """

    when: str
    takes: Callable[P, bool]
    special: Callable[P, R]
    general: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return chosen(self, *args, **kwargs)(*args, **kwargs)


class Prepare(Protocol):
    """Once, after loading: the weights of one part of a layer in the form that a backend reads."""

    def __call__(self, part: Part, spec: ModelSpec, dtype: torch.dtype) -> Part:
        """`part` for activations in `dtype`. In place: what was given may not be used any more."""
        ...


def as_stored(part: Part, spec: ModelSpec, dtype: torch.dtype) -> Part:
    """The form of a checkpoint."""
    return part


@dataclass(frozen=True)
class Kernels:
    """One callable an op, all of one backend; `prepare` for their weights."""

    backend: str
    norm: Norm
    add_norm: AddNorm
    linear: Linear
    head: Head
    attention_inputs: AttentionInputs
    select_blocks: SelectBlocks
    sparse_attention: SparseAttention
    dense_attention: DenseAttention
    mlp: Mlp
    moe: Moe
    sample: Sample
    prepare: Prepare = as_stored

    def served_by(self) -> dict[str, str]:
        """The module that serves each op, or both of two and the case between them."""
        ops = (f.name for f in fields(self) if f.name not in ("backend", "prepare"))
        return {op: server(getattr(self, op)) for op in ops}


def chosen(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Callable[P, R]:
    """The one of an op's functions that serves these arguments."""
    while isinstance(function, ByCase):
        function = function.special if function.takes(*args, **kwargs) else function.general
    return function


def server(function: Callable[..., object]) -> str:
    """The module of an op's function, in words where two share the cases."""
    if isinstance(function, ByCase):
        special, general = server(function.special), server(function.general)
        return f"{special} for {function.when}, else {general}"
    return function.__module__


def why_not(backend: str) -> str | None:
    """None if the backend can serve on this machine, else one sentence that says why not."""
    if backend not in BACKENDS:
        return f"there is no backend {backend!r}; known: {', '.join(BACKENDS)}"
    if backend == "cpu" and compiler() is None:
        return "cpu needs a C++ compiler once, to build its kernels: install g++"
    return None if DEVICES[backend] == "cpu" else _why_not_on_a_gpu(backend)


def insertion(backend: str) -> Insertion:
    """What of a GPU backend's `attention_inputs` follows the projections, for what measures it."""
    if backend == "hopper":
        from winnow.ops.attention_inputs.hopper import insert as in_cuda

        return in_cuda
    if backend == "cuda":
        from winnow.ops.attention_inputs.cuda import insert as in_triton

        return in_triton
    raise UnsupportedError(f"{backend} does not insert in a kernel of its own: use cuda or hopper")


def _why_not_on_a_gpu(backend: str) -> str | None:
    needs = {"cuda": "an NVIDIA GPU", "hopper": "an NVIDIA H100 or H200"}[backend]
    if not torch.cuda.is_available():
        return f"{backend} needs {needs} and a CUDA build of torch; none was found"
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    if capability < (8, 0):
        return f"{backend} needs a GPU with bf16 tensor cores (compute capability 8.0), not {name}"
    if find_spec("triton") is None:
        return f"{backend} needs triton: pip install 'triton>=3.6'"
    if backend == "hopper" and capability != (9, 0):
        return f"hopper needs {needs}, not {name}: use backend (--backend) cuda"
    if backend == "hopper" and cuda_compiler() is None:
        return (
            "hopper needs nvcc once, to build its kernels: install the CUDA toolkit (12.4 or "
            "newer), set NVCC to the compiler's path, or use backend (--backend) cuda"
        )
    return None


def kernels(backend: str) -> Kernels:
    """The ops of a backend; UnsupportedError with the reason if it cannot serve here."""
    reason = why_not(backend)
    if reason is not None:
        raise UnsupportedError(reason)
    return {"cpu": _cpu, "reference": _reference, "cuda": _cuda, "hopper": _hopper}[backend]()


def _reference() -> Kernels:
    from winnow.ops.attention_inputs.reference import attention_inputs
    from winnow.ops.dense_attention.reference import dense_attention
    from winnow.ops.linear.reference import head, linear
    from winnow.ops.mlp.reference import mlp
    from winnow.ops.moe.reference import moe
    from winnow.ops.norm.reference import add_norm, norm
    from winnow.ops.sample.reference import sample
    from winnow.ops.select_blocks.reference import select_blocks
    from winnow.ops.sparse_attention.reference import sparse_attention

    return Kernels(
        backend="reference",
        norm=norm,
        add_norm=add_norm,
        linear=linear,
        head=head,
        attention_inputs=attention_inputs,
        select_blocks=select_blocks,
        sparse_attention=sparse_attention,
        dense_attention=dense_attention,
        mlp=mlp,
        moe=moe,
        sample=sample,
    )


def _cpu() -> Kernels:
    from winnow.ops.attention_inputs.cpu import attention_inputs
    from winnow.ops.dense_attention.cpu import dense_attention
    from winnow.ops.linear.cpu import head, linear
    from winnow.ops.mlp.cpu import mlp
    from winnow.ops.moe.cpu import moe
    from winnow.ops.norm.cpu import add_norm, norm
    from winnow.ops.sample.cpu import sample
    from winnow.ops.select_blocks.cpu import select_blocks
    from winnow.ops.sparse_attention.cpu import sparse_attention

    return Kernels(
        backend="cpu",
        norm=norm,
        add_norm=add_norm,
        linear=linear,
        head=head,
        attention_inputs=attention_inputs,
        select_blocks=select_blocks,
        sparse_attention=sparse_attention,
        dense_attention=dense_attention,
        mlp=mlp,
        moe=moe,
        sample=sample,
    )


def _cuda() -> Kernels:
    from winnow.ops.attention_inputs.cuda import attention_inputs
    from winnow.ops.dense_attention.cuda import dense_attention
    from winnow.ops.linear.cuda import head, linear
    from winnow.ops.mlp.cuda import mlp
    from winnow.ops.moe.cuda import moe
    from winnow.ops.norm.cuda import add_norm, norm
    from winnow.ops.sample.cuda import sample
    from winnow.ops.select_blocks.cuda import select_blocks
    from winnow.ops.sparse_attention.cuda import sparse_attention

    return Kernels(
        backend="cuda",
        norm=norm,
        add_norm=add_norm,
        linear=linear,
        head=head,
        attention_inputs=attention_inputs,
        select_blocks=select_blocks,
        sparse_attention=sparse_attention,
        dense_attention=dense_attention,
        mlp=mlp,
        moe=moe,
        sample=sample,
    )


def _hopper() -> Kernels:
    from winnow.ops.attention_inputs import hopper as inputs
    from winnow.ops.dense_attention import hopper_prefill as full_prefill
    from winnow.ops.linear import hopper as products
    from winnow.ops.mlp import hopper as dense
    from winnow.ops.mlp.cuda import activation
    from winnow.ops.moe import hopper as experts
    from winnow.ops.norm import hopper as norms
    from winnow.ops.select_blocks import hopper as select
    from winnow.ops.select_blocks import hopper_prefill as select_prefill
    from winnow.ops.sparse_attention import hopper as sparse
    from winnow.ops.sparse_attention import hopper_prefill as prefill

    general = _cuda()
    mxfp8 = "bf16 rows and mxfp8 weights in whole strips"
    linear = ByCase(mxfp8, products.takes, products.linear, general.linear)
    mlp = ByCase(mxfp8, dense.takes, dense.mlp(activation), general.mlp)
    narrow = "bf16 rows of up to 8192 values"
    nvfp4 = "bf16 rows and nvfp4 experts in whole tiles"
    decode = "up to 8 rows a request over nvfp4, fp8 or bf16"
    return replace(
        general,
        backend="hopper",
        prepare=_prepare_for_hopper,
        norm=ByCase(narrow, norms.takes, norms.norm, general.norm),
        add_norm=ByCase(narrow, norms.takes_sum, norms.add_norm, general.add_norm),
        linear=linear,
        mlp=mlp,
        moe=ByCase(nvfp4, experts.takes, experts.moe(mlp), general.moe),
        attention_inputs=ByCase(
            "heads of 64 or 128 dims",
            inputs.takes,
            inputs.attention_inputs(linear, products.pair(linear)),
            general.attention_inputs,
        ),
        select_blocks=ByCase(
            decode,
            select.takes,
            select.select_blocks,
            ByCase(
                "more bf16 rows of 128 dims",
                select_prefill.takes,
                select_prefill.select_blocks,
                general.select_blocks,
            ),
        ),
        sparse_attention=ByCase(
            "few rows over nvfp4, fp8 or bf16",
            sparse.takes,
            sparse.sparse_attention,
            ByCase(
                f"more, of {prefill.HEAD_DIM} dims and {prefill.GROUP} query heads a KV head",
                prefill.takes,
                prefill.sparse_attention,
                general.sparse_attention,
            ),
        ),
        dense_attention=ByCase(
            f"nvfp4 or fp8 and more than {full_prefill.MIN_ROWS_EACH} rows a request",
            full_prefill.takes,
            full_prefill.dense_attention,
            general.dense_attention,
        ),
    )


def _prepare_for_hopper(part: Part, spec: ModelSpec, dtype: torch.dtype) -> Part:
    """Packed for tensor cores wherever hopper's own kernels, which take bf16, serve the part."""
    from winnow.ops.linear.hopper import prepare
    from winnow.ops.moe.hopper import prepare as packed_experts

    if dtype is not torch.bfloat16:
        return part
    packed = partial(prepare, woven=True)
    if isinstance(part, MoeWeights):
        moe = packed_experts(part, spec)
        return replace(part, gate_up=moe.gate_up, down=moe.down, shared=moe.shared)
    if isinstance(part, MlpWeights):
        return replace(part, gate_up=packed(part.gate_up), down=packed(part.down))
    index = None if part.index is None else packed(part.index)
    return replace(part, qkv=packed(part.qkv), index=index, out=packed(part.out))
