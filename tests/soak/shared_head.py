"""The soak's drafts in rounds on the device: a head in the target's process, or a language model
that drafts ahead through shared memory."""

from __future__ import annotations

import functools
import random

from services.target.engine import Engine
from shared.models.decoder import Decoder
from shared.tokens import TreeShape
from tests.helpers.device_rounds import Pair
from tests.helpers.mapped_draft import MappedDraft
from tests.helpers.shared_head_rounds import SilentDraft, any_choice, sharing_head

TREE = TreeShape(3, 3, 9)
CHAIN = TreeShape(3, 1, 4)
# With the most sequences of a round of each, so that some are too many for a shape.
OTHER_TREES = {TreeShape(4, 1, 5): 8, TreeShape(2, 8, 16): 3}
# Less than eight long sequences need, so that the head cannot take some; others outgrow it.
NUM_PAGES = 90
CONTEXT_TOKENS = 120


class SoakHead:
    """A head that comes and goes, with which rounds have any shape, or are none, whatever pays.

    Args:
        model: drafts from a thread of its own instead of the head.

    Attributes:
        num_reconnects: how often it came back.
    """

    def __init__(self, engine: Engine, pair: Pair, seed: int, model: Decoder | None = None) -> None:
        self._engine = engine
        self._pair = pair
        self._model = model
        self._mapped: MappedDraft | None = None
        self._source = random.Random(seed)
        self._choose = any_choice(seed)
        self._is_attached = False
        self.num_reconnects = -1
        self._attach()

    def step(self) -> None:
        """Now and then goes, or comes back."""
        policy = self._engine._loop._rounds.policy
        if policy is not None and "choose" not in vars(policy):
            policy.choose = functools.partial(self._choose, policy)  # type: ignore[method-assign]
        if not self._is_attached:
            if self._source.random() < 0.05:
                self._attach()
        elif self._source.random() < 0.003:
            self._engine.detach("embedded")
            self._is_attached = False

    def close(self) -> None:
        """The soak has ended."""
        if self._mapped is not None:
            self._mapped.stop()

    def _attach(self) -> None:
        self._is_attached = True
        self.num_reconnects += 1
        if self._model is not None:
            self.close()
            self._mapped = MappedDraft(
                self._pair, self._engine, "embedded", CHAIN, self._model, is_pinned=False
            )
            self._engine.attach(self._mapped.attachment)
            return
        self._engine.attach(
            sharing_head(
                self._pair,
                SilentDraft(),
                TREE,
                OTHER_TREES,
                num_pages=NUM_PAGES,
                max_context_tokens=CONTEXT_TOKENS,
            )
        )
