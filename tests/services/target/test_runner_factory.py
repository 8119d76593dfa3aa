"""What a model, its device and its settings cannot do together is refused by name."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from services.target import runner_factory
from services.target.runner_factory import build_runner
from services.target.settings import TargetSettings
from shared.errors import SettingsError
from shared.model_options import KvDtype, Quantisation
from tests.helpers.checkpoints import TinyShape, write_checkpoint

POSITIONS = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(max_position_embeddings=POSITIONS)
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", shape=shape)


def _settings(folder: Path, **changes: object) -> TargetSettings:
    return TargetSettings(
        model_path=folder,
        device="cpu",
        max_total_tokens=256,
        **changes,  # type: ignore[arg-type]
    )


def test_context_is_the_models_or_shorter(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert build_runner(_settings(folder)).max_context_tokens == POSITIONS
    assert build_runner(_settings(folder, context_length=64)).max_context_tokens == 64
    assert "context-length" not in caplog.text
    assert build_runner(_settings(folder, context_length=129)).max_context_tokens == POSITIONS
    assert "--context-length is 129; the model has 128 positions" in caplog.text


def test_older_gpus_are_refused_what_they_cannot_compute(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    device = torch.device("cuda", 0)
    runner_factory._check_device(_settings(folder), device)
    asked = _settings(
        folder,
        quantization=Quantisation.FP8,
        kv_cache_dtype=KvDtype.FP8_E4M3,
        enable_deterministic_inference=True,
    )
    with pytest.raises(SettingsError) as raised:
        runner_factory._check_device(asked, device)
    assert [line.split(" needs")[0] for line in raised.value.message.splitlines()] == [
        "--quantization fp8",
        "--kv-cache-dtype fp8_e4m3",
        "--enable-deterministic-inference",
    ]


def test_products_whose_bits_depend_on_the_batch_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(folder, enable_deterministic_inference=True)
    decoder = build_runner(settings).runner.decoder
    with caplog.at_level(logging.WARNING):
        runner_factory._log_other_products(settings, decoder)
        assert not caplog.text, "on a CPU no row depends on its batch"
        monkeypatch.setattr(type(decoder), "device", torch.device("cuda"))
        runner_factory._log_other_products(settings, decoder)
    num_products = len(decoder.layers) * 4 + 1
    assert f"{num_products} of {num_products} products keep the library's kernels" in caplog.text
