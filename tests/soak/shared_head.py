"""The soak's draft in the target's process: it lends its head for rounds on the device."""

from __future__ import annotations

import functools
import random

from services.target.engine import Engine
from shared.tokens import TreeShape
from tests.helpers.device_rounds import Pair
from tests.helpers.shared_head_rounds import SilentDraft, any_choice, sharing_head

TREE = TreeShape(3, 3, 9)
# With the most sequences of a round of each, so that some are too many for a shape.
OTHER_TREES = {TreeShape(4, 1, 5): 8, TreeShape(2, 8, 16): 3}
# Less than eight long sequences need, so that the head cannot take some; others outgrow it.
NUM_PAGES = 90
CONTEXT_TOKENS = 120


class SoakHead:
    """A head that comes and goes, with which rounds have any shape, or are none, whatever pays.

    Attributes:
        num_reconnects: how often it came back.
    """

    def __init__(self, engine: Engine, pair: Pair, seed: int) -> None:
        self._engine = engine
        self._pair = pair
        self._source = random.Random(seed)
        self._choose = any_choice(seed)
        self._is_attached = False
        self.num_reconnects = -1
        self._attach()

    def step(self) -> None:
        """Now and then goes, or comes back."""
        policy = self._engine._loop._rounds._policy
        if policy is not None and "choose" not in vars(policy):
            policy.choose = functools.partial(self._choose, policy)  # type: ignore[method-assign]
        if not self._is_attached:
            if self._source.random() < 0.05:
                self._attach()
        elif self._source.random() < 0.003:
            self._engine.detach("embedded")
            self._is_attached = False

    def _attach(self) -> None:
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
        self._is_attached = True
        self.num_reconnects += 1
