"""Checkpoints: read, convert, and make small or random ones. See docs/formats.md."""

from winnow.model.checkpoint.convert import Converted, convert
from winnow.model.checkpoint.generation import read_generation_config
from winnow.model.checkpoint.load import load_checkpoint
from winnow.model.checkpoint.random import random_weights
from winnow.model.checkpoint.resolve import read_spec
from winnow.model.checkpoint.tiny import make_tiny
from winnow.model.checkpoint.tiny_config import TinyGeometry

__all__ = [
    "Converted",
    "TinyGeometry",
    "convert",
    "load_checkpoint",
    "make_tiny",
    "random_weights",
    "read_generation_config",
    "read_spec",
]
