"""A hit costs no round trip: the tree pushed ahead is verified in the very next step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from services.target.step_report import StepReport
from shared.models.decoder import Decoder
from shared.tokens import Outcome, SamplingParams, StopParams
from tests.helpers.ahead_cases import total_outcomes
from tests.helpers.ahead_draft import DEPTH, AheadDraft
from tests.helpers.engines import build_engine, request, run, tiny_decoder

PROMPT = [1, 2, 3, 4, 5]
SAMPLING = SamplingParams(seed=7)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


def _plain(decoder: Decoder, num_tokens: int) -> list[int]:
    return run(
        build_engine(decoder), [request(PROMPT, SAMPLING, StopParams(num_tokens))]
    ).token_ids(0)


def _run_ahead(
    decoder: Decoder, each_step: Callable[[AheadDraft], None], *, is_held: bool
) -> tuple[list[int], AheadDraft, list[StepReport]]:
    """Every step must do something: a target that waits would do nothing for ever."""
    reports: list[StepReport] = []
    engine = build_engine(decoder, on_step=reports.append)
    draft = AheadDraft(engine, [[*PROMPT, *_plain(decoder, 60)]], is_held=is_held)
    draft.attach()
    collector = run(engine, [request(PROMPT, SAMPLING)], each_step=lambda step: each_step(draft))
    return collector.token_ids(0), draft, reports


def test_hit_is_verified_in_the_next_step(decoder: Decoder) -> None:
    tokens, draft, reports = _run_ahead(decoder, lambda draft: None, is_held=False)
    assert tokens == _plain(decoder, 24)
    # The prompt's own token, then 4 a round: 1 + 6 * 4 covers 24.
    assert len(reports) == 7
    assert [each.outcome for each in draft.verdicts[1:]] == [Outcome.VERIFIED_NEXT_READY] * 5
    assert total_outcomes(reports).hits == {(DEPTH, 0): 5}


def test_candidates_that_arrive_during_the_forward_are_hits(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[AheadDraft] = []

    def each_step(draft: AheadDraft) -> None:
        if not drafts:
            drafts.append(draft)
        if len(draft.verdicts) == 1:
            draft.release()  # the first tree is not conditional

    plain = _plain(decoder, 24)
    compute = type(decoder).forward

    def forward(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        output = compute(self, *args, **kwargs)
        if drafts:
            drafts[0].release()
        return output

    monkeypatch.setattr(type(decoder), "forward", forward)
    tokens, draft, reports = _run_ahead(decoder, each_step, is_held=True)
    assert tokens == plain
    assert [each.outcome for each in draft.verdicts[1:]] == [Outcome.VERIFIED_NEXT_READY] * 5
    assert total_outcomes(reports).num_late_hits == 0


def test_candidates_that_arrive_after_their_verdict_are_verified_without_another_round_trip(
    decoder: Decoder,
) -> None:
    steps = itertools.count()

    def each_step(draft: AheadDraft) -> None:
        # What is for the verdict on a round is held until that verdict is out.
        if next(steps) % 3 == 2:
            draft.release()

    tokens, draft, reports = _run_ahead(decoder, each_step, is_held=True)
    assert tokens == _plain(decoder, 24)
    assert len(reports) == 7
    assert {each.candidate_id for each in draft.verdicts[1:]} == {1, 2, 3, 4, 5}
    assert total_outcomes(reports).num_late_hits > 1


def test_wrong_condition_is_no_hit(decoder: Decoder) -> None:
    """The negative control: with every condition off by one token, the target waits."""
    reports: list[StepReport] = []
    engine = build_engine(decoder, on_step=reports.append)
    answer = [*PROMPT, *_plain(decoder, 60)]
    AheadDraft(engine, [answer], foresees=lambda number, round_: False).attach()
    with pytest.raises(AssertionError, match="does not come to an end"):
        run(engine, [request(PROMPT, SAMPLING)])
    assert total_outcomes(reports).num_hits == 0
