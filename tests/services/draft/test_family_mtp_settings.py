"""Next-token layers of Qwen3-Next, Qwen3.5 and Step-3.5 are found in the target's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from services.draft.algorithm import Algorithm
from services.draft.drafter_factory import feature_layers
from services.draft.settings import DraftSettings
from shared.settings import load_settings
from tests.helpers.family_mtp import FAMILY_MTPS, write_family_mtp


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "MTP"])
@pytest.mark.parametrize("name", FAMILY_MTPS)
def test_layers_are_found_without_a_draft_folder(name: str, algorithm: str, tmp_path: Path) -> None:
    """By the config, or by the weights' index where the config does not say."""
    mtp = FAMILY_MTPS[name]
    write_family_mtp(tmp_path, mtp)
    index = {"weight_map": dict.fromkeys(load_file(tmp_path / "model.safetensors"), "any")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    arguments = ["--target-model-path", str(tmp_path), "--target", "127.0.0.1:1"]
    arguments += ["--speculative-algorithm", algorithm]
    settings = load_settings(DraftSettings, service="draft", arguments=arguments, env={})
    assert settings.algorithm is Algorithm.MTP
    assert settings.model_folder == tmp_path
    # The residual stream of the last layer, or what the final norm makes of it.
    assert feature_layers(settings) == (mtp.num_layers + (0 if mtp.is_step else 1),)
