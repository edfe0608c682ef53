"""Which function serves each op on a backend, and why a backend cannot serve here.

The only module that knows backends by name. `reference` is the definition, slow and plain; `cpu`,
with kernels in C++, is the default. A backend serves all ops or says in one sentence why it cannot.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from winnow.errors import UnsupportedError
from winnow.ops.attention_inputs import AttentionInputs
from winnow.ops.dense_attention import DenseAttention
from winnow.ops.linear import Linear
from winnow.ops.mlp import Mlp
from winnow.ops.moe import Moe
from winnow.ops.native import compiler
from winnow.ops.norm import Norm
from winnow.ops.sample import Sample
from winnow.ops.select_blocks import SelectBlocks
from winnow.ops.sparse_attention import SparseAttention

BACKENDS = ("cpu", "reference", "hopper")


@dataclass(frozen=True)
class Kernels:
    """One callable an op, all of one backend."""

    backend: str
    norm: Norm
    linear: Linear
    attention_inputs: AttentionInputs
    select_blocks: SelectBlocks
    sparse_attention: SparseAttention
    dense_attention: DenseAttention
    mlp: Mlp
    moe: Moe
    sample: Sample

    def served_by(self) -> dict[str, str]:
        """The module that serves each op."""
        ops = (f.name for f in fields(self) if f.name != "backend")
        return {op: getattr(self, op).__module__ for op in ops}


def why_not(backend: str) -> str | None:
    """None if the backend can serve on this machine, else one sentence that says why not."""
    if backend not in BACKENDS:
        return f"there is no backend {backend!r}; known: {', '.join(BACKENDS)}"
    if backend == "cpu" and compiler() is None:
        return "cpu needs a C++ compiler once, to build its kernels: install g++"
    if backend != "hopper":
        return None
    if not torch.cuda.is_available():
        return "hopper needs an NVIDIA H100 or H200 and a CUDA build of torch; none was found"
    return (
        "hopper serves no model in this version: of its kernels only decode of select_blocks and "
        f"sparse_attention exist; {torch.cuda.get_device_name()} stays unused"
    )


def kernels(backend: str) -> Kernels:
    """The ops of a backend; UnsupportedError with the reason if it cannot serve here."""
    reason = why_not(backend)
    if reason is not None:
        raise UnsupportedError(reason)
    return _reference() if backend == "reference" else _cpu()


def _reference() -> Kernels:
    from winnow.ops.attention_inputs.reference import attention_inputs
    from winnow.ops.dense_attention.reference import dense_attention
    from winnow.ops.linear.reference import linear
    from winnow.ops.mlp.reference import mlp
    from winnow.ops.moe.reference import moe
    from winnow.ops.norm.reference import norm
    from winnow.ops.sample.reference import sample
    from winnow.ops.select_blocks.reference import select_blocks
    from winnow.ops.sparse_attention.reference import sparse_attention

    return Kernels(
        backend="reference",
        norm=norm,
        linear=linear,
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
    from winnow.ops.linear.cpu import linear
    from winnow.ops.mlp.cpu import mlp
    from winnow.ops.moe.cpu import moe
    from winnow.ops.norm.cpu import norm
    from winnow.ops.sample.cpu import sample
    from winnow.ops.select_blocks.cpu import select_blocks
    from winnow.ops.sparse_attention.cpu import sparse_attention

    return Kernels(
        backend="cpu",
        norm=norm,
        linear=linear,
        attention_inputs=attention_inputs,
        select_blocks=select_blocks,
        sparse_attention=sparse_attention,
        dense_attention=dense_attention,
        mlp=mlp,
        moe=moe,
        sample=sample,
    )
