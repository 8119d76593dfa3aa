"""`python -m tests.bench.step_messages`: what the messages of a step cost the hosts of both sides.

A target's bookkeeping and a draft's, without models, pass each other the bytes of one step after
another: a tree of six nodes and eight conditional ones a lane, then verdicts that each match one of
them. Prints microseconds of processor time a lane, the median of many steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from services.draft.drafters.drafter import OneStepLookahead, Proposal
from services.draft.events import LinkOpened, LinkTerms, Output
from services.draft.link_codec import event_from_response, request_from_output
from services.draft.rounds import Rounds
from services.draft.sequence_table import SequenceTable
from services.target.drafts.attachment import Offer
from services.target.drafts.attachments import Attachments
from services.target.drafts.draft_messages import draft_messages
from services.target.sequence import Sequence
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.rpc.columns import TreeLimits, candidates_from_message, report_from_message
from shared.tokens import Condition, DraftReport, TokenTree, TreeShape
from tests.helpers.one_draft import make_attachment, make_sequence
from tests.load.figures import table
from tests.services.draft.scripted_drafter import ScriptedDrafter

T = TypeVar("T")
LINK, VOCAB_SIZE = 1, 1000
SHAPE = TreeShape(3, 2, 7)
PARTS = {
    "decide": "target: verdicts of a step, next trees selected",
    "verdicts out": "target: verdicts to bytes",
    "verdicts in": "draft: bytes to sequences that are due",
    "candidates out": "draft: trees to bytes",
    "candidates in": "target: bytes to trees that are checked and fenced",
}


class _AheadDrafter(ScriptedDrafter):
    """Its trees are handed to the rounds, those for the verdicts on them as well."""

    lookahead = OneStepLookahead()  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class StepMessages:
    """Both sides of one attachment.

    Attributes:
        cpu_s: processor time of each part, of each step.
    """

    attachments: Attachments
    sequences: list[Sequence]
    table: SequenceTable
    rounds: Rounds
    outputs: list[Output]
    cpu_s: defaultdict[str, list[float]]
    tree: TokenTree
    num_conditional: int

    @classmethod
    def of(cls, num_lanes: int, num_conditional: int) -> StepMessages:
        """Opens all sequences at the draft."""
        source = random.Random(1)
        tokens = tuple(source.randrange(VOCAB_SIZE // 2) for _ in range(6))
        tree = TokenTree(tokens, (None, 0, 1, None, 3, 2), (-0.5,) * 6)
        outputs: list[Output] = []
        drafter, deliver = _AheadDrafter(), outputs.append
        table = SequenceTable(drafter, max_sequences=num_lanes, deliver=deliver)
        rounds = Rounds(
            table, drafter, SHAPE, chunk_tokens=64, outcome_budget=num_conditional, deliver=deliver
        )
        table.apply(LinkOpened(LINK, LinkTerms(VOCAB_SIZE, 64, num_lanes, mirrors_noise=True)))
        attachments, attachment = Attachments(), make_attachment(max_sequences=num_lanes)
        sequences = [make_sequence(each, num_tokens=1 << 20) for each in range(1, num_lanes + 1)]
        attachments.attach(attachment, sequences, 0.0)
        bench = cls(
            *(attachments, sequences, table, rounds, outputs),
            *(defaultdict(list), tree, num_conditional),
        )
        bench._hear(bench._said())
        return bench

    def step(self, number: int) -> None:
        """Drafts, verifies and answers once."""
        proposals = self._drafted()
        requests = self._timed("candidates out", lambda: self._answer(proposals))
        self._timed("candidates in", lambda: self._take(requests, float(number)))
        committed = (*self.tree.token_ids[:2], VOCAB_SIZE - 1 - number % self.num_conditional)
        for sequence in self.sequences:
            sequence.commit(committed)
        self._timed("decide", lambda: self._decide(committed, float(number)))
        responses = self._timed("verdicts out", self._said)
        self._timed("verdicts in", lambda: self._hear(responses))

    def _drafted(self) -> list[Proposal]:
        due = list(self.table.due.values())
        proposals = [Proposal(each, self.tree) for each in due]
        for sequence in (*due, *self.table.unprepared.values()):
            proposals += [
                Proposal(sequence, self.tree, Condition(1, VOCAB_SIZE - 1 - rank))
                for rank in range(self.num_conditional)
            ]
        return proposals

    def _answer(self, proposals: list[Proposal]) -> list[bytes]:
        self.outputs.clear()
        self.rounds.send(proposals, DraftReport(0.001))
        return [request_from_output(each).SerializeToString() for each in self.outputs]

    def _take(self, requests: list[bytes], now_s: float) -> None:
        limits = TreeLimits(64, VOCAB_SIZE, 64)
        for each in requests:
            batch = pb.SpeculateRequest.FromString(each).candidates
            candidates = candidates_from_message(batch, limits)
            offer = Offer("a", candidates, report_from_message(batch), now_s)
            self.attachments.offer(offer)

    def _decide(self, committed: tuple[int, ...], now_s: float) -> None:
        verdicts = self.attachments.verdicts
        for sequence in self.sequences:
            verdicts.count_round(sequence, 2, was_verified=True, now_s=now_s)
            verdicts.decided(
                sequence, committed, (0, 1), was_verified=True, since_s=None, now_s=now_s
            )

    def _said(self) -> list[bytes]:
        [(_, message)] = self.attachments.drafts.take_messages()
        return [each.SerializeToString() for each in draft_messages(message)]

    def _hear(self, responses: list[bytes]) -> None:
        for each in responses:
            event = event_from_response(LINK, pb.SpeculateResponse.FromString(each), None)
            assert event is not None
            self.table.apply(event)

    def _timed(self, part: str, work: Callable[[], T]) -> T:
        start_s = time.thread_time()
        result = work()
        self.cpu_s[part].append(time.thread_time() - start_s)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="step_messages", description=__doc__)
    parser.add_argument("--lanes", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--conditional", type=int, default=8, help="conditional trees a lane")
    parser.add_argument("--steps", type=int, default=100)
    flags = parser.parse_args()
    columns: list[list[str]] = []
    for num_lanes in flags.lanes:
        bench = StepMessages.of(num_lanes, flags.conditional)
        for number in range(flags.steps):
            bench.step(number)
        median_us = [1e6 * statistics.median(bench.cpu_s[part]) / num_lanes for part in PARTS]
        columns.append([f"{each:.1f}" for each in median_us])
    head = ("µs of CPU time a lane", *(f"{each} lanes" for each in flags.lanes))
    print(table(head, [(PARTS[p], *row) for p, *row in zip(PARTS, *columns, strict=True)]))


if __name__ == "__main__":
    main()
