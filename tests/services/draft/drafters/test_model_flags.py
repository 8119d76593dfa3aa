"""What flags of the draft's model do once it is loaded."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from services.draft.drafter_factory import build_drafter
from services.draft.drafters.model_factory import draft_options
from services.draft.settings import DraftSettings
from shared.errors import CheckpointError, SettingsError
from shared.kernels import linear
from shared.model_options import Dtype, Quantisation
from shared.models.config import ModelConfig
from shared.models.heads.config import HeadConfig, HeadKind
from shared.settings import load_settings
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.draft_heads import TinyHead, write_head


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(max_position_embeddings=256)
    return write_checkpoint(tmp_path_factory.mktemp("draft"), shape=shape)


def _settings(folder: Path, *arguments: str) -> DraftSettings:
    flags = ("--speculative-draft-model-path", str(folder), "--device", "cpu", *arguments)
    return load_settings(DraftSettings, service="draft", arguments=flags, env={})


@pytest.mark.parametrize("quantisation", ["int8", "fp8"])
def test_the_memory_saved_is_said_at_start(
    folder: Path, quantisation: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        build_drafter(_settings(folder))
        assert "8-bit layers" not in caplog.text
        build_drafter(_settings(folder, "--speculative-draft-model-quantization", quantisation))
    assert "8-bit layers save 0.1 MiB" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "changes", "expected"),
    [
        ((), {}, Quantisation.FP8),
        (("--dtype", "float32"), {}, Quantisation.UNQUANT),
        (("--speculative-draft-model-quantization", "unquant"), {}, Quantisation.UNQUANT),
        (("--speculative-draft-model-quantization", "int8"), {}, Quantisation.INT8),
        ((), {"quantization_config": {"quant_method": "fp8"}}, Quantisation.UNQUANT),
        ((), {"intermediate_size": 192}, Quantisation.UNQUANT),
        (("--tp-size", "2"), {}, Quantisation.UNQUANT),
    ],
)
def test_a_language_model_is_in_fp8_where_the_device_multiplies_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    changes: dict[str, Any],
    expected: Quantisation,
) -> None:
    monkeypatch.setattr(linear, "is_hopper", lambda device: True)
    shape = TinyShape(hidden_size=128, intermediate_size=128, head_dim=32, num_heads=4)
    folder = write_checkpoint(tmp_path, shape=shape)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    settings = _settings(folder, *arguments)
    device = torch.device("cpu")
    dtype = torch.bfloat16 if settings.dtype is Dtype.AUTO else torch.float32
    options = draft_options(settings, ModelConfig.from_folder(folder), dtype, device)
    assert options.quantisation is expected


@pytest.mark.parametrize(
    ("target_size", "intermediate_size", "expected"),
    [
        (128, 256, Quantisation.FP8),
        (128, 192, Quantisation.UNQUANT),
        (96, 256, Quantisation.UNQUANT),
    ],
)
def test_so_is_a_head(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target_size: int,
    intermediate_size: int,
    expected: Quantisation,
) -> None:
    monkeypatch.setattr(linear, "is_hopper", lambda device: True)
    shape = TinyShape(hidden_size=target_size, num_layers=6)
    target = ModelConfig.from_folder(write_checkpoint(tmp_path / "target", shape=shape))
    head = TinyHead(
        kind="EAGLE3",
        vocab_size=target.vocab_size,
        hidden_size=128,
        target_hidden_size=target_size,
        head_dim=32,
        intermediate_size=intermediate_size,
        draft_vocab_size=20,
    )
    folder = write_head(tmp_path / "head", head)
    config = HeadConfig.from_folder(folder, HeadKind.EAGLE3, target)
    options = draft_options(_settings(folder), config, torch.bfloat16, torch.device("cpu"))
    assert options.quantisation is expected
    assert options.lm_head_quantisation is expected


def test_a_window_bounds_the_context_beside_the_tree(folder: Path) -> None:
    assert build_drafter(_settings(folder)).limits.max_context_tokens == 256
    windowed = build_drafter(_settings(folder, "--speculative-draft-window-size", "100"))
    assert windowed.limits.max_context_tokens == 133
    wide = build_drafter(_settings(folder, "--speculative-draft-window-size", "5000"))
    assert wide.limits.max_context_tokens == 256


def test_a_load_format_reads_no_other(folder: Path) -> None:
    build_drafter(_settings(folder, "--speculative-draft-load-format", "safetensors"))
    with pytest.raises(CheckpointError, match=r"has no pytorch_model\.bin"):
        build_drafter(_settings(folder, "--speculative-draft-load-format", "pt"))


def test_what_needs_cuda_is_refused_on_a_cpu_by_name(folder: Path) -> None:
    flag = "--speculative-draft-attention-backend"
    with pytest.raises(SettingsError, match=rf"{flag}.*needs CUDA; the device is cpu"):
        build_drafter(_settings(folder, flag, "triton"))


def test_a_draft_leaves_the_threads_of_its_process_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    build_drafter(_settings(folder, "--num-threads", "7"))
    assert calls == []
