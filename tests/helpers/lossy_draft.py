"""A draft behind a bad network."""

from __future__ import annotations

import random
from collections import deque

from services.draft.drafters.drafter import Drafter
from services.draft.events import LinkClosed
from services.target.drafts.attachment import DraftMessage
from services.target.drafts.draft_messages import draft_messages
from services.target.engine import Engine
from shared.tokens import Candidate, TreeShape
from tests.helpers.wired_draft import LINK, WiredDraft


class LossyDraft(WiredDraft):
    """Receives and sends messages late; its candidates may be lost, repeated or reordered.

    The target's messages arrive complete and in order, as on a stream. The draft's need not,
    because the target trusts no draft.
    """

    wait_s = 40.0

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter,
        shape: TreeShape,
        outcome_budget: int,
        *,
        seed: int,
        delay: int,
        loss: float,
        name: str = "wired",
    ) -> None:
        super().__init__(engine, drafter, shape, outcome_budget, name=name)
        self._source = random.Random(seed)
        self._delay = delay
        self._loss = loss
        self._to_draft: deque[bytes] = deque()
        self._to_target: list[Candidate] = []

    def send(self, message: DraftMessage) -> bool:
        self._to_draft.extend(part.SerializeToString() for part in draft_messages(message))
        return True

    def offer(self, candidates: tuple[Candidate, ...]) -> None:
        for candidate in candidates:
            copies = self._source.choice((1, 1, 1, 2))
            if self._source.random() >= self._loss:
                self._to_target += [candidate] * copies

    def pump(self) -> None:
        """Delivers some of the messages under way, and lets the draft compute a little."""
        for _ in range(self._source.randint(0, self._delay)):
            if self._to_draft and self._source.random() < 0.7:
                self.receive(self._to_draft.popleft())
            self.rounds.step()
        self._source.shuffle(self._to_target)
        count = self._source.randint(0, len(self._to_target))
        arrived, self._to_target = self._to_target[:count], self._to_target[count:]
        super().offer(tuple(arrived))

    def each_step(self, step: int) -> None:
        """For `run`: pumps, and loses the stream twice in a row and once more."""
        if step in (15, 16, 40):
            self.reconnect()
        self.pump()

    def reconnect(self) -> None:
        """Loses the stream with all messages on it, and attaches again."""
        self.disconnect()
        self.attach()

    def disconnect(self) -> None:
        """Loses the stream with all messages on it; the next one is open, but not attached."""
        self.detach()
        self._to_draft.clear()
        self.table.apply(LinkClosed(LINK))
        self.open_link()
