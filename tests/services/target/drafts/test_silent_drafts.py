"""Sequences leave a draft that does not answer for one that does, which is then tried again."""

from __future__ import annotations

import pytest

from services.target.drafts.attachment import Attachment, Offer
from services.target.drafts.attachments import Attachments
from services.target.drafts.draft_policy import ALWAYS
from services.target.sequence import Sequence
from shared.candidate_columns import CandidateColumns
from shared.tokens import NO_REPORT
from tests.helpers.one_draft import commit, make_attachment, make_candidate, make_sequence

STEP_S = 0.05


class _Pool:
    """Sequences at the drafts `a` and `b`, round by round. Only drafts that are awake answer."""

    def __init__(self, *, room: int = 8) -> None:
        self.attachments = Attachments(always_up_to=ALWAYS)
        self.a, self.b = make_attachment("a"), make_attachment("b", max_sequences=room)
        self.awake = {"a", "b"}
        self.sequences: list[Sequence] = []
        self.now_s, self._num_opened = 0.0, 0
        for draft in (self.a, self.b):
            self.attachments.attach(draft, [], 0.0)

    def open(self) -> Sequence:
        self._num_opened += 1
        sequence = make_sequence(self._num_opened, num_tokens=500)
        self.sequences.append(sequence)
        self.attachments.assignments.assign(sequence, self.now_s)
        return sequence

    def step(self) -> None:
        """Ends a round of every sequence."""
        self.attachments.readiness.begin_turn(self.sequences, self.now_s)
        answered = [each for each in self.sequences if self._answers(each)]
        waits_s = map(self.attachments.readiness.deadline_s, self.sequences)
        self.now_s = max(self.now_s + STEP_S, *waits_s)
        for sequence in self.sequences:
            has_tree = sequence in answered
            tokens, accepted = ((5, 6, 9), (0, 1)) if has_tree else ((9,), ())
            commit(
                self.attachments,
                sequence,
                tokens,
                accepted=accepted,
                was_verified=has_tree,
                now_s=self.now_s,
            )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def end(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.attachments.assignments.close(sequence)

    def draft_of(self, sequence: Sequence) -> Attachment:
        assignment = self.attachments.assignments.get(sequence.sequence_id)
        assert assignment is not None
        return assignment.attachment

    def _answers(self, sequence: Sequence) -> bool:
        assignment = self.attachments.assignments.get(sequence.sequence_id)
        assert assignment is not None
        name = assignment.attachment.identity.attachment_id
        if name not in self.awake or assignment.requested.is_paused:
            return False
        candidate = make_candidate(sequence)
        self.attachments.offer(Offer(name, CandidateColumns.of([candidate]), NO_REPORT, self.now_s))
        return assignment.candidate is not None


@pytest.fixture
def pool() -> _Pool:
    """With a sequence at each draft, both of which have answered for a while."""
    pool = _Pool()
    first, second = pool.open(), pool.open()
    pool.steps(10)
    assert (pool.draft_of(first), pool.draft_of(second)) == (pool.a, pool.b)
    return pool


def _silence(pool: _Pool) -> None:
    """Has the sequence of `a` leave it."""
    pool.awake.discard("a")
    first, second = pool.sequences
    pool.attachments.drafts.take_messages()
    while pool.draft_of(first) is pool.a:
        pool.step()
        assert first.round < 24
    assert pool.draft_of(second) is pool.b


def test_sequences_of_a_silent_draft_move_to_one_that_answers(pool: _Pool) -> None:
    first = pool.sequences[0]
    _silence(pool)
    assert first.sequence_id in pool.a.outbox.closed
    assert first.sequence_id in {each.sequence_id for each in pool.b.outbox.opened}
    num_verified = pool.b.counters.num_verified_rounds
    pool.steps(4)
    assert pool.b.counters.num_verified_rounds == num_verified + 8


def test_they_stay_where_no_other_draft_answers(pool: _Pool) -> None:
    pool.awake.clear()
    drafts = [pool.draft_of(each) for each in pool.sequences]
    pool.steps(12)
    assert [pool.draft_of(each) for each in pool.sequences] == drafts


def test_they_stay_where_no_other_draft_has_room() -> None:
    pool = _Pool(room=1)
    first, second = pool.open(), pool.open()
    pool.steps(10)
    pool.awake.discard("a")
    pool.steps(12)
    assert (pool.draft_of(first), pool.draft_of(second)) == (pool.a, pool.b)


def test_a_silent_draft_gets_one_sequence_when_it_is_tried_again(pool: _Pool) -> None:
    _silence(pool)
    assert pool.draft_of(pool.open()) is pool.b, "it was silent a moment ago"
    pool.now_s += 60.0
    tried, other = pool.open(), pool.open()
    assert (pool.draft_of(tried), pool.draft_of(other)) == (pool.a, pool.b)
    pool.steps(6)
    assert pool.draft_of(tried) is pool.b, "it is still silent"
    assert pool.a.timeout.is_cold


def test_a_draft_that_answers_again_gets_its_share_again(pool: _Pool) -> None:
    _silence(pool)
    for each in list(pool.sequences):
        pool.end(each)
    pool.awake.add("a")
    pool.now_s += 60.0
    tried = pool.open()
    pool.steps(10)
    assert pool.draft_of(tried) is pool.a
    assert not pool.a.timeout.is_cold
    pool.end(tried)
    assert {pool.draft_of(pool.open()).identity.attachment_id for _ in range(4)} == {"a", "b"}
