"""A draft without sockets: the target's engine, the messages and the drafter are real."""

from __future__ import annotations

from services.draft.drafters.drafter import Drafter
from services.draft.events import (
    CandidatesReady,
    LinkOpened,
    LinkTerms,
    Output,
    SequencesReleased,
    WorkerIdentity,
)
from services.draft.link_codec import attach_request, event_from_response, request_from_output
from services.draft.rounds import Rounds
from services.draft.sequence_table import SequenceTable
from services.target.drafts.assignments import MAX_CONDITIONAL_CANDIDATES
from services.target.drafts.attachment import Attachment, DraftIdentity, DraftMessage, DraftTimeout
from services.target.drafts.draft_messages import draft_messages, feature_spec
from services.target.engine import Engine
from shared.candidate_columns import CandidateColumns
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.rpc.columns import TreeLimits, candidates_from_message
from shared.tokens import Candidate, TreeShape
from tests.helpers.engines import VOCAB_SIZE

LINK = 1


class WiredDraft:
    """A `DraftPort` that reads serialized messages and answers within the target's step.

    Attributes:
        wait_s: the target's timeout; its clock advances a second whenever it is read.
    """

    wait_s = 0.5

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter,
        shape: TreeShape,
        outcome_budget: int = 0,
        *,
        name: str = "wired",
        max_sequences: int = 8,
    ) -> None:
        self.engine = engine
        self.name = name
        self.max_sequences = max_sequences
        self.spec = drafter.limits.feature_spec
        self.table = SequenceTable(drafter, max_sequences=max_sequences, deliver=self._deliver)
        self.rounds = Rounds(
            self.table,
            drafter,
            shape,
            chunk_tokens=16,
            outcome_budget=outcome_budget,
            deliver=self._deliver,
        )
        self.open_link()

    def open_link(self) -> None:
        """Opens the link in the draft, possibly again after the target was lost."""
        terms = LinkTerms(
            VOCAB_SIZE,
            64,
            self.max_sequences,
            mirrors_noise=True,
            max_conditional=MAX_CONDITIONAL_CANDIDATES,
        )
        self.table.apply(LinkOpened(LINK, terms))

    def attach(self) -> None:
        worker = WorkerIdentity(
            "w", "m", "EAGLE", None, self.max_sequences, 128, feature_spec=self.spec
        )
        message = pb.SpeculateRequest.FromString(attach_request(worker).SerializeToString())
        spec = None if self.spec is None else feature_spec(message.attach.feature_spec)
        identity = DraftIdentity(self.name, "w", "m", "EAGLE", self.max_sequences, 0.0)
        self.engine.attach(Attachment(identity, self, DraftTimeout(self.wait_s), spec))

    def detach(self) -> None:
        self.engine.detach(self.name)

    def send(self, message: DraftMessage) -> bool:
        for response in draft_messages(message):
            self.receive(response.SerializeToString())
        while self.rounds.step():
            pass
        return True

    def receive(self, response: bytes) -> None:
        """Takes in one message, as bytes."""
        event = event_from_response(LINK, pb.SpeculateResponse.FromString(response), self.spec)
        assert event is not None
        self.table.apply(event)

    def close(self) -> None:
        raise AssertionError("the target gave the draft up")

    def offer(self, candidates: tuple[Candidate, ...]) -> None:
        """Hands candidates to the target."""
        self.engine.offer(self.name, CandidateColumns.of(candidates))

    def _deliver(self, output: Output) -> None:
        if isinstance(output, SequencesReleased):
            self.engine.release(self.name, output.sequence_ids)
            return
        assert isinstance(output, CandidatesReady)
        wire = request_from_output(output).SerializeToString()
        batch = pb.SpeculateRequest.FromString(wire).candidates
        self.offer(tuple(candidates_from_message(batch, TreeLimits(64, VOCAB_SIZE, 64))))
