"""An embedded draft that answers within the target's step: everything but its thread is real."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from services.draft.drafters.drafter import Drafter
from services.draft.engine import Deliver, DraftEngine
from services.draft.events import Event, LinkClosed, LinkOpened, LinkTerms, Output, WorkerIdentity
from services.draft.rounds import Rounds
from services.draft.sequence_table import SequenceTable
from services.embedded import EmbeddedDraft
from services.target.drafts.attachment import AttachmentTerms
from services.target.engine import Engine
from services.target.verifier import VerificationMode
from shared.tokens import TreeShape

if TYPE_CHECKING:
    from services.target.drafts.attachment import DraftMessage

_LINK = 1


class SteppedDraftEngine:
    """Stands in for `DraftEngine` with one link; steps when `step` is called."""

    def __init__(self, drafter: Drafter, shape: TreeShape, *, max_sequences: int) -> None:
        self.table = SequenceTable(drafter, max_sequences=max_sequences, deliver=self._deliver)
        self.rounds = Rounds(self.table, drafter, shape, chunk_tokens=512, deliver=self._deliver)
        self._deliver_to_link: Deliver = lambda output: None

    def open_link(self, terms: LinkTerms, deliver: Deliver) -> int:
        self._deliver_to_link = deliver
        self.submit(LinkOpened(_LINK, terms))
        return _LINK

    def close_link(self, link: int) -> None:
        self.submit(LinkClosed(link))

    def submit(self, event: Event) -> None:
        self.table.apply(event)

    def step(self) -> None:
        """Runs rounds until there is nothing left to do."""
        while self.rounds.step():
            pass

    def _deliver(self, output: Output) -> None:
        self._deliver_to_link(output)


class HostedDraft(EmbeddedDraft):
    """An embedded draft, hosted by `target`; attach it with `attach("")`."""

    def __init__(
        self,
        target: Engine,
        drafter: Drafter,
        shape: TreeShape,
        mode: VerificationMode,
        *,
        max_sequences: int = 64,
    ) -> None:
        self.stepped = SteppedDraftEngine(drafter, shape, max_sequences=max_sequences)
        spec = drafter.limits.feature_spec
        worker = WorkerIdentity(
            "w", "m", "TEST", None, max_sequences, None, feature_spec=spec, shape=shape
        )
        # The target's clock advances a second whenever it is read.
        terms = AttachmentTerms(mode, max_nodes=64, max_sequences=max_sequences, longest_wait_s=0.5)
        super().__init__(target, cast(DraftEngine, self.stepped), worker, terms)

    def send(self, message: DraftMessage) -> bool:
        is_taken = super().send(message)
        self.stepped.step()
        return is_taken
