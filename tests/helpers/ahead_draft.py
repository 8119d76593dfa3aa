"""A draft that knows the right answers. The test decides which verdicts it foresees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.target.drafts.attachment import (
    Attachment,
    DraftIdentity,
    DraftMessage,
    DraftTimeout,
    FeatureRows,
)
from services.target.drafts.feature_store import FeatureSpec
from services.target.engine import Engine
from shared.candidate_columns import CandidateColumns
from shared.tokens import Candidate, Condition, TokenTree, Verdict

DEPTH = 3
NEVER_S = 1e9


@dataclass
class AheadDraft:
    """Sends a tree for the current round only after a verdict on none of its own trees. After every
    verdict it sends a conditional tree for the round after the current one. The target would wait
    for this draft for ever.

    Attributes:
        answers: complete sequences, prompt and output, that begin differently.
        foresees: whether the draft foresees the verdict on a round, by answer and round.
        recovers: also sends a tree after a verdict that it did not foresee.
        is_held: keeps candidates in `held` instead of sending them.
        offer: sends candidates to the engine; None calls `Engine.offer`.
        features: the feature rows received, by answer.
    """

    engine: Engine
    answers: Sequence[Sequence[int]]
    foresees: Callable[[int, int], bool] = lambda number, round_: True
    recovers: bool = False
    is_held: bool = False
    name: str = "ahead"
    max_sequences: int = 64
    feature_spec: FeatureSpec | None = None
    features: dict[int, list[FeatureRows]] = field(default_factory=dict)
    offer: Callable[[str, list[Candidate]], None] | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    held: list[list[Candidate]] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _num_sent: dict[int, int] = field(default_factory=dict)
    _pushed: dict[int, Condition] = field(default_factory=dict)

    def attach(self) -> None:
        identity = DraftIdentity(self.name, self.name, "m", "SCRIPTED", self.max_sequences, 0.0)
        self.engine.attach(Attachment(identity, self, DraftTimeout(NEVER_S), self.feature_spec))

    def send(self, message: DraftMessage) -> bool:
        for opened in message.opened:
            length = opened.num_prompt_tokens
            self._numbers[opened.sequence_id] = next(
                number
                for number, answer in enumerate(self.answers)
                if tuple(answer[:length]) == opened.token_ids[:length]
            )
        for rows in message.features:
            self.features.setdefault(self._numbers[rows.sequence_id], []).append(rows)
        for verdict in message.verdicts:
            self.verdicts.append(verdict)
            self._answer(verdict)
        return True

    def close(self) -> None:
        raise AssertionError("the target gave the draft up")

    def release(self) -> None:
        """Sends the held candidates."""
        while self.held:
            candidates = self.held.pop(0)
            if self.offer is None:
                self.engine.offer(self.name, CandidateColumns.of(candidates))
            else:
                self.offer(self.name, candidates)

    def _answer(self, verdict: Verdict) -> None:
        sequence_id, number = verdict.sequence_id, self._numbers[verdict.sequence_id]
        answer = self.answers[number]
        count, round_ = verdict.committed_token_count, verdict.round + 1
        was_foreseen = self._pushed.get(sequence_id) == verdict.condition
        batch: list[Candidate] = []
        if verdict.candidate_id is None or (self.recovers and not was_foreseen):
            batch.append(self._candidate(sequence_id, round_, count, answer[count:], None))
        after = count + DEPTH + 1
        bonus = answer[after - 1] + (not self.foresees(number, round_))
        self._pushed[sequence_id] = Condition(DEPTH - 1, bonus, self._num_sent[sequence_id])
        batch.append(
            self._candidate(sequence_id, round_, count, answer[after:], self._pushed[sequence_id])
        )
        self.held.append(batch)
        if not self.is_held:
            self.release()

    def _candidate(
        self,
        sequence_id: int,
        round_: int,
        count: int,
        rest: Sequence[int],
        condition: Condition | None,
    ) -> Candidate:
        self._num_sent[sequence_id] = number = self._num_sent.get(sequence_id, 0) + 1
        tree = TokenTree.chain(rest[:DEPTH])
        return Candidate(sequence_id, round_, count, tree, condition, number)
