"""A draft without sockets: the target's engine, the wire's messages and the drafter are real."""

from __future__ import annotations

from services.draft.drafters.drafter import Drafter
from services.draft.events import CandidatesReady, LinkOpened, LinkTerms, Output
from services.draft.link_codec import attach_request, event_from_response
from services.draft.roster import Roster
from services.draft.rounds import Rounds
from services.draft.worker import WorkerIdentity
from services.target.attachment import Attachment, DraftIdentity, DraftMessage
from services.target.draft_messages import draft_messages, feature_spec
from services.target.engine import Engine
from services.target.patience import Patience
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.tokens import TreeShape
from tests.helpers.engines import VOCAB_SIZE


class WiredDraft:
    """A `DraftPort` that reads the bytes of the wire and answers within the target's step."""

    def __init__(self, engine: Engine, drafter: Drafter, shape: TreeShape) -> None:
        self.engine = engine
        self.spec = drafter.limits.feature_spec
        self.roster = Roster(drafter, max_sequences=8, deliver=self._deliver)
        self.rounds = Rounds(self.roster, drafter, shape, chunk_tokens=16, deliver=self._deliver)
        self.roster.apply(LinkOpened(1, LinkTerms(VOCAB_SIZE, 64, 8, mirrors_noise=True)))

    def attach(self) -> None:
        worker = WorkerIdentity("w", "m", "EAGLE", None, 8, 128, feature_spec=self.spec)
        message = pb.SpeculateRequest.FromString(attach_request(worker).SerializeToString())
        spec = feature_spec(message.attach.feature_spec)
        identity = DraftIdentity("wired", "w", "m", "EAGLE", 8, 0.0)
        self.engine.attach(Attachment(identity, self, Patience(0.5), spec))

    def send(self, message: DraftMessage) -> bool:
        for response in draft_messages(message):
            wire = pb.SpeculateResponse.FromString(response.SerializeToString())
            event = event_from_response(1, wire, self.spec)
            assert event is not None
            self.roster.apply(event)
        while self.rounds.step():
            pass
        return True

    def close(self) -> None:
        raise AssertionError("the target gave the draft up")

    def _deliver(self, output: Output) -> None:
        assert isinstance(output, CandidatesReady)
        self.engine.offer("wired", output.candidates)
