"""A draft gets every feature row once, in order, and they are those of a plain forward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from services.target.drafts.attachments import Attachments
from services.target.drafts.feature_store import MAX_STORES, FeatureFeed, FeatureSpec
from services.target.engine import Engine
from shared.errors import FailedPrecondition
from shared.kv.leases import KvLeases
from shared.models.decoder import Decoder
from shared.tokens import SamplingParams, StopParams
from tests.helpers.engines import (
    ScriptedDraft,
    build_engine,
    oracle_trees,
    request,
    run,
    tiny_decoder,
)
from tests.helpers.plain_forward import plain_forward

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
SAMPLING = SamplingParams(seed=7)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"), num_layers=3)


def _spec(decoder: Decoder, layers: tuple[int, ...] = (1, 3, 4), width: int = 8) -> FeatureSpec:
    generator = torch.Generator().manual_seed(1)
    inputs = len(layers) * decoder.config.hidden_size
    projection = torch.randn((width, inputs), generator=generator)
    return FeatureSpec("spec", layers, torch.float32, projection)


def _expected(decoder: Decoder, spec: FeatureSpec, tokens: Sequence[int]) -> Tensor:
    """Rows of every position of `tokens` from one plain forward."""
    output = plain_forward(decoder, tokens, (0,), capture_layers=(1, 3))
    parts = torch.cat([*output.features, output.hidden], dim=-1)
    assert spec.projection is not None
    return parts @ spec.projection.T


def _draft(engine: Engine, decoder: Decoder, whole: Sequence[int]) -> ScriptedDraft:
    script = oracle_trees([whole], 3, quality=0.6)
    return ScriptedDraft(engine, script, feature_spec=_spec(decoder))


def _check(draft: ScriptedDraft, decoder: Decoder, whole: Sequence[int], first: int = 0) -> None:
    """Rows follow each other without gap or repeat, and equal the plain forward's."""
    [blocks] = draft.features.values()
    position = first
    for block in blocks:
        assert block.position_offset == position
        position = block.end
    assert draft.feature_spec is not None
    expected = _expected(decoder, draft.feature_spec, whole)
    found = torch.cat([block.rows for block in blocks])
    torch.testing.assert_close(found, expected[first:position], atol=1e-5, rtol=1e-5)
    assert position > len(PROMPT)


def _whole(decoder: Decoder) -> list[int]:
    return [*PROMPT, *run(build_engine(decoder), [request(PROMPT, SAMPLING)]).token_ids(0)]


@pytest.mark.parametrize("max_step_rows", [64, 4])
def test_rows_are_those_of_a_plain_forward(decoder: Decoder, max_step_rows: int) -> None:
    whole = _whole(decoder)
    engine = build_engine(decoder, max_step_rows=max_step_rows)
    draft = _draft(engine, decoder, whole)
    draft.attach()
    collector = run(engine, [request(PROMPT, SAMPLING)])
    assert collector.finished(0).stats.num_accepted > 0
    _check(draft, decoder, whole)


def test_cached_prompt_brings_its_features_along(decoder: Decoder) -> None:
    whole = _whole(decoder)
    engine = build_engine(decoder)
    draft = _draft(engine, decoder, whole)
    draft.attach()
    run(engine, [request(PROMPT, SAMPLING)])
    draft.features.clear()
    collector = run(engine, [request(PROMPT, SAMPLING)])
    assert collector.finished(0).num_cached_tokens == 8
    _check(draft, decoder, whole)


def test_prompts_that_were_cached_without_features_are_read_anew(decoder: Decoder) -> None:
    """No head could draft behind them."""
    whole = _whole(decoder)
    engine = build_engine(decoder)
    draft = _draft(engine, decoder, whole)
    cached = []
    run(engine, [request(PROMPT, SAMPLING)])
    for _ in range(2):
        draft.features.clear()
        draft.attach()
        collector = run(engine, [request(PROMPT, SAMPLING)])
        cached.append(collector.finished(0).num_cached_tokens)
        _check(draft, decoder, whole)
        draft.detach()
    # One that comes back finds the features that were kept meanwhile.
    assert cached == [0, 8]


def test_draft_that_attaches_again_mid_sequence_gets_all_rows(decoder: Decoder) -> None:
    whole = _whole(decoder)
    engine = build_engine(decoder)
    first, second = _draft(engine, decoder, whole), _draft(engine, decoder, whole)
    second.name = "second"
    actions = {0: first.attach, 4: first.detach, 7: second.attach}
    run(
        engine,
        [request(PROMPT, SAMPLING, StopParams(24))],
        each_step=lambda step: actions.get(step, lambda: None)(),
    )
    _check(second, decoder, whole)


def test_rows_from_before_the_first_attach_are_missing_at_the_front(decoder: Decoder) -> None:
    whole = _whole(decoder)
    engine = build_engine(decoder)
    draft = _draft(engine, decoder, whole)
    run(
        engine,
        [request(PROMPT, SAMPLING)],
        each_step=lambda step: draft.attach() if step == 3 else None,
    )
    first = draft.features[1][0].position_offset
    assert first == len(PROMPT) + 2
    _check(draft, decoder, whole, first=first)


def test_preemption_repeats_and_loses_no_row(decoder: Decoder) -> None:
    whole = _whole(decoder)
    engine = build_engine(decoder, num_pages=12, prefix_cache=False)
    draft = _draft(engine, decoder, whole)
    draft.attach()
    other = request([7, 7, 7], SamplingParams(seed=1))
    run(engine, [other, request(PROMPT, SAMPLING)])
    blocks = draft.features.pop(1)
    assert blocks
    _check(draft, decoder, whole)


@pytest.mark.parametrize(
    ("layers", "projection", "text"),
    [
        ((), None, r"layer_indices has 0; \[1, 8\] can be read"),
        ((1,) * 9, None, r"layer_indices has 9; \[1, 8\] can be read"),
        ((0, 1, 2, 3, 4), None, "features is 160 wide; the target keeps 128, 4 hidden states"),
        ((1,), torch.zeros(200, 32), "features is 200 wide; the target keeps 128"),
        ((5,), None, r"layer 5; the target has \[0, 4\]"),
        ((1, 2), torch.zeros(4, 7), r"projection is \[4, 7\]; 2 layers of 32 need \[W, 64\]"),
    ],
)
def test_features_the_target_does_not_have_are_refused(
    decoder: Decoder, layers: tuple[int, ...], projection: Tensor | None, text: str
) -> None:
    spec = FeatureSpec("bad", layers, torch.float32, projection)
    with pytest.raises(FailedPrecondition, match=text):
        build_engine(decoder).feature_width(spec)


def _feed() -> FeatureFeed:
    return FeatureFeed(
        Attachments().assignments, KvLeases(1, 4), num_slots=4, num_layers=4, hidden_size=32,
        device=torch.device("cpu"),
    )  # fmt: skip


def test_memory_of_drafts_that_left_is_given_up() -> None:
    feed = _feed()
    specs = {key: FeatureSpec(key, (1,), torch.float32, None) for key in "abc"}
    for key in "aab":
        feed.open(specs[key])
    for key in "aab":
        feed.close(specs[key])
    assert [feed.kept(specs[key]) is not None for key in "abc"] == [False, True, False]
    kept = feed.kept(specs["b"])
    feed.open(specs["b"])
    assert feed.kept(specs["b"]) is kept
    feed.close(specs["b"])
    feed.open(specs["c"])
    assert [feed.kept(specs[key]) is not None for key in "abc"] == [False, False, True]


def test_different_features_are_kept_up_to_a_bound() -> None:
    feed = _feed()
    specs = [FeatureSpec(key, (1,), torch.float32, None) for key in "abcde"]
    for spec in (*specs[:MAX_STORES], specs[0]):
        feed.open(spec)
    with pytest.raises(FailedPrecondition, match="drafts read 4 different features; 4 are kept"):
        feed.open(specs[MAX_STORES])
    feed.close(specs[1])
    feed.open(specs[MAX_STORES])
