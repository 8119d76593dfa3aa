"""What is not done with linear attention is refused by name, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.draft.recurrent_drafts import check_no_states
from services.target.runner_factory import check_recurrent, has_device_rounds
from services.target.settings import TargetSettings
from shared.errors import CheckpointError, SettingsError
from shared.models.config import ModelConfig
from shared.settings import load_settings
from tests.helpers.checkpoints import DELTA, TinyShape, write_checkpoint
from tests.helpers.served import draft_settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_5", TinyShape(overrides=DELTA))


def _settings(folder: Path, *flags: str) -> TargetSettings:
    arguments = ["--model-path", str(folder), *flags]
    return load_settings(TargetSettings, service="target", arguments=arguments, env={})


@pytest.mark.parametrize(
    ("flags", "device", "problem"),
    [
        (["--tp-size", "2"], "cpu", "--tp-size is 2; .* has linear attention"),
        (["--kv-cache-dtype", "fp8_e4m3"], "cpu", "--kv-cache-dtype is fp8_e4m3; .* in 8 bits"),
        (
            ["--device-rounds", "on", "--speculative-fallback", "none"],
            "cuda",
            "--device-rounds is on; .* on a GPU it needs auto or off",
        ),
    ],
)
def test_flags_of_a_target(folder: Path, flags: list[str], device: str, problem: str) -> None:
    config = ModelConfig.from_folder(folder)
    check_recurrent(_settings(folder), config, torch.device(device))
    settings = _settings(folder, *flags)
    with pytest.raises(SettingsError, match=problem):
        check_recurrent(settings, config, torch.device(device))


def test_rounds_on_a_gpu_are_for_other_models(folder: Path, tmp_path: Path) -> None:
    recurrent = ModelConfig.from_folder(folder)
    other = ModelConfig.from_folder(write_checkpoint(tmp_path, "llama"))
    assert not has_device_rounds(_settings(folder), recurrent, torch.device("cuda"))
    assert has_device_rounds(_settings(folder), other, torch.device("cuda"))
    is_on = _settings(folder, "--device-rounds", "on", "--speculative-fallback", "none")
    assert has_device_rounds(is_on, recurrent, torch.device("cpu"))


def test_drafts(folder: Path) -> None:
    settings = draft_settings("STANDALONE", folder, "--target", "127.0.0.1:1")
    with pytest.raises(CheckpointError, match=r"has linear attention; .*STANDALONE"):
        check_no_states(settings)
    check_no_states(draft_settings("MTP", folder, "--target", "127.0.0.1:1"))
