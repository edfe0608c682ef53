"""Fixtures that many tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from winnow.model.checkpoint import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint with a byte-level tokenizer, as `winnow make-tiny` writes it."""
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny(directory / "model", seed=1)
    return directory / "model"


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    """CI machines have two cores; more threads than cores make small operations crawl."""
    torch.set_num_threads(max(1, 2 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
