"""A hit costs no round trip: the tree pushed ahead is verified in the very next step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.target.drafts.attachment import Attachment, DraftIdentity, DraftMessage
from services.target.drafts.patience import Patience
from services.target.engine import Engine
from services.target.step_report import StepReport
from shared.models.decoder import Decoder
from shared.tokens import (
    Candidate,
    Condition,
    Outcome,
    SamplingParams,
    StopParams,
    TokenTree,
    Verdict,
)
from tests.helpers.ahead_cases import total_outcomes
from tests.helpers.engines import build_engine, request, run, tiny_decoder

PROMPT = [1, 2, 3, 4, 5]
DEPTH = 3
NEVER_S = 1e9
SAMPLING = SamplingParams(seed=7)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


@dataclass
class AheadDraft:
    """Knows the right answer, and after its first tree sends only what is for the round after the
    one under way. The target would wait for it for ever.

    Attributes:
        is_held: keeps what it would send in `held`.
    """

    engine: Engine
    answer: Sequence[int]
    verdicts: list[Verdict] = field(default_factory=list)
    held: list[list[Candidate]] = field(default_factory=list)
    is_held: bool = False
    num_sent: int = 0

    def attach(self) -> None:
        identity = DraftIdentity("ahead", "ahead", "m", "SCRIPTED", 64, 0.0)
        self.engine.attach(Attachment(identity, self, Patience(NEVER_S)))

    def send(self, message: DraftMessage) -> bool:
        for verdict in message.verdicts:
            self.verdicts.append(verdict)
            self._answer(verdict)
        return True

    def close(self) -> None:
        raise AssertionError("the target gave the draft up")

    def release(self) -> None:
        """Sends what was held."""
        while self.held:
            self.engine.offer("ahead", self.held.pop(0))

    def _answer(self, verdict: Verdict) -> None:
        count, round_ = verdict.committed_token_count, verdict.round + 1
        batch: list[Candidate] = []
        if verdict.candidate_id is None:
            batch.append(self._candidate(verdict.sequence_id, round_, count, count, None))
        verified = self.num_sent
        after = count + DEPTH + 1
        condition = Condition(DEPTH - 1, self.answer[after - 1], verified)
        batch.append(self._candidate(verdict.sequence_id, round_, count, after, condition))
        self.held.append(batch)
        if not self.is_held:
            self.release()

    def _candidate(
        self, sequence_id: int, round_: int, count: int, start: int, condition: Condition | None
    ) -> Candidate:
        self.num_sent += 1
        tree = TokenTree.chain(self.answer[start : start + DEPTH])
        return Candidate(sequence_id, round_, count, tree, condition, self.num_sent)


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
    draft = AheadDraft(engine, [*PROMPT, *_plain(decoder, 60)], is_held=is_held)
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
    draft = AheadDraft(engine, [*answer[:9], answer[9] + 1, *answer[10:]])
    draft.attach()
    with pytest.raises(AssertionError, match="does not come to an end"):
        run(engine, [request(PROMPT, SAMPLING)])
    assert total_outcomes(reports).num_hits == 0
