"""Checkpoints of two versions of one tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    return write_checkpoint(folder, "llama", seed=3, with_tokenizer=True)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    return write_checkpoint(folder, "llama", seed=4, with_tokenizer=True)
