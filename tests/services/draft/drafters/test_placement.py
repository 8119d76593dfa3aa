"""The context of a draft: as long as the checkpoint allows, and no longer than was asked for."""

from __future__ import annotations

import logging

import pytest

from services.draft.drafters.model_factory import context_for
from services.draft.settings import DraftSettings
from shared.errors import CheckpointError
from shared.settings import load_settings


def _settings(*flags: str) -> DraftSettings:
    arguments = ("--speculative-algorithm", "EAGLE3", *flags)
    return load_settings(DraftSettings, service="draft", arguments=list(arguments), env={})


def test_the_context_is_the_checkpoints_unless_it_is_set() -> None:
    assert context_for(_settings(), 4096, margin_tokens=16) == 4096
    assert context_for(_settings("--context-length", "512"), 4096, margin_tokens=16) == 512
    # Raised again, up to the checkpoint's positions.
    assert context_for(_settings("--context-length", "4096"), 4096, margin_tokens=16) == 4096


def test_a_context_beyond_the_checkpoints_positions_is_cut_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert context_for(_settings("--context-length", "8192"), 4096, margin_tokens=16) == 4096
    assert "--context-length is 8192; the draft's checkpoint has positions for 4096" in caplog.text


def test_a_context_without_room_for_trees_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the draft's context is 24 tokens"):
        context_for(_settings(), 24, margin_tokens=16)
