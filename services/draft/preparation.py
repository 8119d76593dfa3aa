"""Which shape a wish gets, and when another one is prepared for. No torch.

What trees of a shape need once, such as CUDA graphs, takes as long as many rounds. So a wish takes
effect once that is there; until then trees keep to a shape that is prepared for, and the one that
is wished for is prepared in small parts: while nobody waits, or else in a share of the time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from shared.tokens import TreeShape

PREPARED_SHARE = 0.25
"""Of the time, while sequences are open: their rounds go without trees meanwhile."""

LONGEST_PUT_OFF_S = 1.0
"""How long trees that are owed go first; where some always are, nothing would be prepared."""

MOST_WANTED = 8
"""Shapes to prepare for; those that were wished for longest ago are given up."""


class Prepares(Protocol):
    """The part of a `Drafter` that is called here."""

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        """See `Drafter`."""

    def prepare_for(self, shape: TreeShape, num_sequences: int) -> bool:
        """See `Drafter`."""

    def prepare_next(self, shape: TreeShape) -> bool:
        """See `Drafter`."""


class Preparation:
    """Wishes of all targets of one drafter. Owned by the engine thread.

    Args:
        announce: called when `is_warming` has changed.
        clock: in seconds.

    Attributes:
        is_warming: something is being prepared, so trees are late.
        last_s: how long the last thing took.
    """

    def __init__(
        self, drafter: Prepares, announce: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self.is_warming = False
        self.last_s = 0.0
        self._drafter = drafter
        self._announce = announce
        self._clock = clock
        self._served: dict[TreeShape, TreeShape] = {}
        self._last: TreeShape | None = None
        self._wanted: OrderedDict[TreeShape, int] = OrderedDict()
        self._not_before_s = -math.inf
        self._is_idling = False
        self._put_off_s = -math.inf

    @property
    def num_wanted(self) -> int:
        """Shapes that are left to prepare for."""
        return len(self._wanted)

    def begin_step(self) -> None:
        """What is prepared may have changed."""
        self._served.clear()

    def shape_for(self, wished: TreeShape, own: TreeShape, num_sequences: int) -> TreeShape:
        """Returns the shape that trees get: the one that is wished for if it is prepared, else the
        one that was served last, else the draft's own. Holds until `begin_step`.

        Args:
            num_sequences: that are open.
        """
        served = self._served.get(wished)
        if served is None:
            served = self._served[wished] = self._choose(wished, own, num_sequences)
        return served

    def is_due(self, *, is_idle: bool, is_owed: bool = False) -> bool:
        """Whether to prepare something now.

        Args:
            is_idle: no sequence is open.
            is_owed: somebody waits for a tree.
        """
        while self._wanted:
            shape, num_sequences = next(iter(self._wanted.items()))
            if not self._drafter.is_prepared(shape, num_sequences):
                return is_idle or self._clock() >= self._begins_s(is_owed=is_owed)
            del self._wanted[shape]
        return False

    def _begins_s(self, *, is_owed: bool) -> float:
        """When a share of the time is due again."""
        return max(self._not_before_s, self._put_off_s) if is_owed else self._not_before_s

    def advance(self) -> None:
        """Prepares one thing for the shape that was wished for last; only where `is_due`."""
        shape, num_sequences = next(iter(self._wanted.items()))
        self._warm(lambda: self._drafter.prepare_for(shape, num_sequences))

    def ensure(self, shape: TreeShape, num_sequences: int) -> None:
        """Prepares everything for a shape that trees are grown in now, if anything is left."""

        def prepare() -> None:
            while self._drafter.prepare_for(shape, num_sequences):
                pass

        if not self._drafter.is_prepared(shape, num_sequences):
            self._warm(prepare)

    def prepare_next(self, shape: TreeShape) -> bool:
        """Prepares one thing for trees of a shape that nobody waits for; whether one was left. That
        shows afterwards only, so targets are told from the second thing on."""
        if not self._is_idling:
            self._is_idling = self._drafter.prepare_next(shape)
        else:
            self._warm(lambda: self._idle(shape))
        return self._is_idling

    def _idle(self, shape: TreeShape) -> None:
        self._is_idling = self._drafter.prepare_next(shape)

    def _choose(self, wished: TreeShape, own: TreeShape, num_sequences: int) -> TreeShape:
        for shape in filter(None, (wished, self._last, own)):
            if self._drafter.is_prepared(shape, num_sequences):
                self._last = shape
                return shape
            self._want(shape, num_sequences)
        # Nothing is prepared, so somebody has to wait.
        return own

    def _want(self, shape: TreeShape, num_sequences: int) -> None:
        if not self._wanted:
            self._put_off_s = self._clock() + LONGEST_PUT_OFF_S
        self._wanted[shape] = max(num_sequences, self._wanted.get(shape, 0))
        self._wanted.move_to_end(shape, last=False)
        while len(self._wanted) > MOST_WANTED:
            self._wanted.popitem()

    def _warm(self, prepare: Callable[[], object]) -> None:
        """Prepares something while targets know that they need not wait."""
        start_s, self.is_warming = self._clock(), True
        self._announce()
        prepare()
        end_s, self.is_warming = self._clock(), False
        self.last_s = end_s - start_s
        self._not_before_s = end_s + self.last_s * (1.0 / PREPARED_SHARE - 1.0)
        self._put_off_s = self._not_before_s + LONGEST_PUT_OFF_S
        self._announce()
