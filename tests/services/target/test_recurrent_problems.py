"""What is not done with linear attention is refused by name, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.draft.drafter_factory import check_no_states
from services.target.engine_factory import check_recurrent
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
    ("flags", "problem"),
    [
        (["--tp-size", "2"], "--tp-size is 2; .* has linear attention"),
        (["--kv-cache-dtype", "fp8_e4m3"], "--kv-cache-dtype is fp8_e4m3; .* in 8 bits"),
    ],
)
def test_flags_of_a_target(folder: Path, flags: list[str], problem: str) -> None:
    config = ModelConfig.from_folder(folder)
    check_recurrent(_settings(folder), config)
    settings = _settings(folder, *flags)
    with pytest.raises(SettingsError, match=problem):
        check_recurrent(settings, config)


def test_drafts(folder: Path) -> None:
    settings = draft_settings("STANDALONE", folder, "--target", "127.0.0.1:1")
    with pytest.raises(CheckpointError, match=r"has linear attention; .*STANDALONE"):
        check_no_states(settings)
    check_no_states(draft_settings("MTP", folder, "--target", "127.0.0.1:1"))
