"""From settings to a drafter with a head."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from services.draft.drafter_factory import (
    build_drafter,
    feature_layers,
    model_id,
    tokenizer_identity,
)
from services.draft.settings import DraftSettings
from shared.errors import CheckpointError
from shared.model_files import tokenizer_sha256
from shared.settings import load_settings
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.draft_heads import TinyHead, write_head

SHAPE = TinyShape(vocab_size=300, num_layers=6, max_position_embeddings=256)
EAGLE = TinyHead(vocab_size=300, has_embedding=False)
EAGLE3 = TinyHead(kind="EAGLE3", vocab_size=300, draft_vocab_size=50, has_embedding=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), shape=SHAPE, with_tokenizer=True)


def _settings(head: Path, target: Path, algorithm: str, *arguments: str) -> DraftSettings:
    flags = (
        *("--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", str(head)),
        *("--target-model-path", str(target)),
        *("--device", "cpu", "--max-total-tokens", "256"),
        *arguments,
    )
    return load_settings(DraftSettings, service="draft", arguments=flags, env={})


@pytest.mark.parametrize(
    ("algorithm", "head", "layers"),
    [("EAGLE", EAGLE, (7,)), ("NEXTN", EAGLE, (7,)), ("EAGLE3", EAGLE3, (2, 3, 3))],
)
def test_a_drafter_is_built_from_its_folder_and_its_targets(
    algorithm: str, head: TinyHead, layers: tuple[int, ...], tmp_path: Path, target: Path
) -> None:
    settings = _settings(write_head(tmp_path / "tiny", head), target, algorithm)
    limits = build_drafter(settings).limits
    assert limits.feature_spec is not None
    assert limits.feature_spec.layer_indices == feature_layers(settings) == layers
    assert (limits.vocab_size, limits.max_context_tokens) == (300, 128)
    assert model_id(settings) == "tiny"
    assert tokenizer_identity(settings) == tokenizer_sha256(target)


def test_a_shorter_context_is_said_with_both_numbers(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = _settings(write_head(tmp_path, EAGLE), target, "EAGLE")
    with caplog.at_level(logging.WARNING):
        build_drafter(settings)
    assert "context is 128 tokens, the target's 256" in caplog.text


def test_a_context_as_long_as_the_targets_needs_no_warning(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = TinyHead(vocab_size=300, has_embedding=False, max_position_embeddings=256)
    with caplog.at_level(logging.WARNING):
        build_drafter(_settings(write_head(tmp_path, head), target, "EAGLE"))
    assert caplog.text == ""


def test_eagle3_ignores_a_token_map_with_a_notice(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_head(tmp_path, EAGLE3)
    settings = _settings(folder, target, "EAGLE3", "--speculative-token-map", "/nowhere.json")
    with caplog.at_level(logging.WARNING):
        build_drafter(settings)
    assert "--speculative-token-map is ignored" in caplog.text


def test_eagle_takes_a_token_map(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps([5, 6, 7]))
    folder = write_head(tmp_path / "head", EAGLE)
    settings = _settings(folder, target, "EAGLE", "--speculative-token-map", str(path))
    with caplog.at_level(logging.INFO):
        build_drafter(settings)
    assert "3 of 300 tokens" in caplog.text
    bad = _settings(folder, target, "EAGLE", "--speculative-token-map", "/nowhere.json")
    with pytest.raises(CheckpointError, match=r"/nowhere\.json"):
        build_drafter(bad)


def test_a_head_of_another_target_is_refused_at_start(tmp_path: Path, target: Path) -> None:
    folder = write_head(tmp_path, TinyHead(vocab_size=64))
    with pytest.raises(CheckpointError, match=r"embed_tokens.*\[64, 32\].*\[300, 32\]"):
        build_drafter(_settings(folder, target, "EAGLE"))
