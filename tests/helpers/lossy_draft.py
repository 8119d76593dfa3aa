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
    """Hears and says things late, and what it says may be lost, repeated or out of order.

    What the target says arrives in order and whole, as on a stream; what the draft says need not,
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
        self._heard: deque[bytes] = deque()
        self._said: list[Candidate] = []

    def send(self, message: DraftMessage) -> bool:
        self._heard.extend(each.SerializeToString() for each in draft_messages(message))
        return True

    def offer(self, candidates: tuple[Candidate, ...]) -> None:
        for candidate in candidates:
            copies = self._source.choice((1, 1, 1, 2))
            if self._source.random() >= self._loss:
                self._said += [candidate] * copies

    def pump(self) -> None:
        """Lets some of what is under way arrive, and the draft compute a little."""
        for _ in range(self._source.randint(0, self._delay)):
            if self._heard and self._source.random() < 0.7:
                self.hear(self._heard.popleft())
            self.rounds.step()
        self._source.shuffle(self._said)
        num_now = self._source.randint(0, len(self._said))
        now, self._said = self._said[:num_now], self._said[num_now:]
        super().offer(tuple(now))

    def each_step(self, step: int) -> None:
        """For `run`: pumps, and loses the stream twice in a row and once more."""
        if step in (15, 16, 40):
            self.reconnect()
        self.pump()

    def reconnect(self) -> None:
        """Loses the stream with all that is on it, and attaches again."""
        self.disconnect()
        self.attach()

    def disconnect(self) -> None:
        """Loses the stream with all that is on it; the next one is open, but not attached."""
        self.detach()
        self._heard.clear()
        self.table.apply(LinkClosed(LINK))
        self.open_link()
