"""Compiles the Triton kernels that a call would launch, for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type


@contextmanager
def compiling(capability: int, built: dict[tuple[Any, ...], Any]) -> Iterator[None]:
    """While open, a launch compiles its kernel for `capability` (90: sm_90) and runs nothing.

    `built` gets each variant once, by name, types and constants. What the kernels would have
    written stays as it was, so values are meaningless; shapes, dtypes and launches are real.
    """

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {n: kwargs.pop(n) for n in ("num_warps", "num_stages") if n in kwargs}
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        assert bound.keys() == set(self.arg_names), f"{self.__name__}: {bound.keys()}"
        constants = {p.name: bound[p.name] for p in self.params if p.is_constexpr}
        constants |= {name: None for name, value in bound.items() if value is None}
        types = {
            n: "constexpr" if n in constants else mangle_type(v, False) for n, v in bound.items()
        }
        key = (self.__name__, *sorted(types.items()), *sorted(map(str, constants.items())))
        if key not in built:
            source = ASTSource(self, types, constants)
            built[key] = triton.compile(
                source, target=GPUTarget("cuda", capability, 32), options=options
            )

    original: Callable[..., Any] = JITFunction.run
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = original
