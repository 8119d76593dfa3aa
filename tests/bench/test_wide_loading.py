"""A folder without weights is loaded as the wide model that it describes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.draft.drafters import model_factory
from services.target import engine_factory
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.heads import target_tensors
from shared.models.loader import load_decoder
from tests.bench.wide_loading import (
    describe,
    described,
    load_wide_decoder,
    load_wide_models,
    open_wide_target,
)
from tests.bench.wide_model import SHAPE_32B, WideModel, WideShape
from tests.helpers.checkpoints import TinyShape, write_checkpoint

CPU = torch.device("cpu")
WIDE = WideShape(96, 5, 16, 4, 200, 90)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "small", shape=TinyShape(vocab_size=64))


def test_it_loads_as_the_files_of_that_size_would(small: Path, tmp_path: Path) -> None:
    model = describe(tmp_path / "wide", small, WIDE)
    assert not list((tmp_path / "wide").glob("*.safetensors"))
    assert ModelConfig.from_folder(tmp_path / "wide") == model.config
    model.write(tmp_path / "files", dtype=torch.float32, shard_size_bytes=10**9)
    expected = load_decoder(tmp_path / "files", dtype=torch.float32, device=CPU)
    found = load_wide_decoder(tmp_path / "wide", dtype=torch.float32, device=CPU)
    assert torch.equal(found.embedding, expected.embedding)
    for few, many in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(few.attention.qkv.dense(), many.attention.qkv.dense())
        assert torch.equal(few.mlp.down.dense(), many.mlp.down.dense())


def test_heads_borrow_the_wide_tensors(small: Path, tmp_path: Path) -> None:
    describe(tmp_path / "wide", small, WIDE)
    tensors = open_wide_target(tmp_path / "wide", dtype=torch.float32, device=CPU)
    assert tensors.config.hidden_size == 96
    assert tensors.embedding().shape == tensors.lm_head().shape == (90, 96)


def test_other_folders_are_loaded_as_ever(small: Path) -> None:
    assert described(small, CPU) is None
    decoder = load_wide_decoder(small, dtype=torch.float32, device=CPU)
    assert decoder.config.hidden_size == 32
    tensors = open_wide_target(small, dtype=torch.float32, device=CPU)
    assert tensors.embedding().shape == (64, 32)


def test_both_services_load_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    factories = (engine_factory, model_factory)
    for factory in factories:
        monkeypatch.setattr(factory, "load_decoder", load_decoder)
    monkeypatch.setattr(target_tensors, "TargetFolder", target_tensors.TargetFolder)
    monkeypatch.setattr(Checkpoint, "open", Checkpoint.open)
    load_wide_models()
    assert all(factory.load_decoder is load_wide_decoder for factory in factories)  # type: ignore[attr-defined]
    assert target_tensors.TargetFolder is open_wide_target  # type: ignore[comparison-overlap]


def test_the_demo_fits_into_a_32b() -> None:
    demo = Path(__file__).parents[2] / "shared" / "demo" / "target"
    model = WideModel(demo, SHAPE_32B, spare_token=3, device=torch.device("meta"))
    assert model.config.num_layers == 64
    assert len(model.axes.queries.index) == 40 * 128
