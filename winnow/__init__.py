"""Winnow serves block-sparse-attention mixture-of-experts models with 4-bit state.

Importing the package loads nothing heavy: `LLM` and `SamplingParams` load torch on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from winnow.config import SamplingParams as SamplingParams
    from winnow.engine.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from winnow.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from winnow.config import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'winnow' has no attribute {name!r}")
