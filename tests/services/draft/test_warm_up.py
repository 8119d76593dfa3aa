"""What a drafter computes before its first target."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.draft.drafter_factory import build_drafter
from services.draft.drafters.drafter import Drafter
from services.draft.engine import DraftEngine, warm_up
from services.draft.events import FeatureRows
from services.draft.settings import DraftSettings
from shared.models.heads.feature_spec import FeatureSpec
from shared.settings import load_settings
from shared.tokens import SamplingParams, TreeShape
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.draft_heads import TinyHead, write_head
from tests.services.draft.scripted_drafter import ScriptedDrafter

PAGE_SIZE = 4


@pytest.fixture(params=["EAGLE", "EAGLE3"])
def head(request: pytest.FixtureRequest, tmp_path: Path) -> Drafter:
    target = write_checkpoint(tmp_path / "target", shape=TinyShape(vocab_size=64, num_layers=6))
    folder = write_head(tmp_path / "head", TinyHead(kind=request.param, draft_vocab_size=20))
    flags = (
        *("--speculative-algorithm", request.param, "--device", "cpu"),
        *("--speculative-draft-model-path", str(folder), "--target-model-path", str(target)),
        *("--max-total-tokens", "512", "--page-size", str(PAGE_SIZE)),
    )
    return build_drafter(load_settings(DraftSettings, service="draft", arguments=flags, env={}))


@pytest.fixture
def engine(head: Drafter) -> Iterator[DraftEngine]:
    engine = DraftEngine(head, TreeShape(3, 2, 6), chunk_tokens=64, max_sequences=4)
    engine.start()
    yield engine
    engine.stop()


def test_a_head_is_warmed_up_by_a_real_tree_and_leaves_nothing_behind(
    head: Drafter, engine: DraftEngine, caplog: pytest.LogCaptureFixture
) -> None:
    idle = dict(head.gauges())
    with caplog.at_level(logging.DEBUG, logger="services.draft.engine"):
        warm_up(engine, head.limits.feature_spec)
    assert "proposed 5 tokens" in caplog.text
    engine.check().result()
    assert engine.num_sequences == 0
    assert head.gauges() == idle, "zero features are cached for no prompt"


def test_where_kernels_are_compiled_prompts_of_many_lengths_are_proposed_for_together(
    head: Drafter, engine: DraftEngine, caplog: pytest.LogCaptureFixture
) -> None:
    idle = dict(head.gauges())
    with caplog.at_level(logging.DEBUG, logger="services.draft.engine"):
        warm_up(engine, head.limits.feature_spec, most_at_once=4)
    assert "2 prompts of 40 tokens" in caplog.text
    assert "8 prompts" not in caplog.text
    engine.check().result()
    assert engine.num_sequences == 0
    assert head.gauges() == idle


def test_features_that_come_with_a_probe_are_what_makes_its_tree(
    head: Drafter, engine: DraftEngine
) -> None:
    spec = head.limits.feature_spec
    assert spec is not None
    rows = FeatureRows(0, torch.ones(2, spec.width))
    without = engine.propose_once((1, 2, 3), SamplingParams(), None).result().tree
    with_rows = engine.propose_once((1, 2, 3), SamplingParams(), None, features=rows).result().tree
    assert (without is None, with_rows is None) == (False, False)
    assert (len(without or ()), len(with_rows or ())) == (0, 5)


def test_a_head_that_proposes_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    spec = FeatureSpec((1,), torch.float32, 4)
    drafter = ScriptedDrafter(num_slots=0, feature_spec=spec)
    engine = DraftEngine(drafter, TreeShape(3, 1, 4), chunk_tokens=64, max_sequences=4)
    engine.start()
    warm_up(engine, spec)
    engine.stop()
    assert "warm-up proposed nothing" in caplog.text
