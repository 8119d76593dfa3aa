"""Warm-up of tree shapes while the draft serves, and the shape of trees until then. No torch.

A new shape needs CUDA graphs, which take as long as many rounds. Trees get a requested shape once
its graphs exist; until then they keep a shape that has them. Graphs are made one at a time: while
nobody waits, or else within a share of the time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from shared.tokens import TreeShape

PREPARED_SHARE = 0.25
"""Share of the time for warm-up while sequences are open; their rounds have no trees then."""

LONGEST_PUT_OFF_S = 1.0
"""Longest time that requested trees come before warm-up; under load some are always requested."""

MOST_WANTED = 8
"""Most shapes that wait for warm-up; those requested longest ago are dropped."""


class Prepares(Protocol):
    """The methods of a `Drafter` for warm-up."""

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        """See `Drafter`."""

    def prepare_for(self, shape: TreeShape, num_sequences: int) -> bool:
        """See `Drafter`."""

    def prepare_next(self, shape: TreeShape) -> bool:
        """See `Drafter`."""


class Preparation:
    """Requested shapes and warm-up of one drafter. Owned by the engine thread.

    Args:
        announce: called when `is_warming` has changed.
        clock: in seconds.

    Attributes:
        is_warming: a warm-up is under way, so trees are late.
        last_s: duration of the last warm-up.
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
        """Shapes that wait for warm-up."""
        return len(self._wanted)

    def begin_step(self) -> None:
        """Forgets the shapes chosen in the last step: more may be ready now."""
        self._served.clear()

    def shape_for(self, requested: TreeShape, own: TreeShape, num_sequences: int) -> TreeShape:
        """Returns the shape of trees: the requested one if it is ready, else the one used last,
        else the draft's own. The same until `begin_step`.

        Args:
            num_sequences: open ones.
        """
        served = self._served.get(requested)
        if served is None:
            served = self._served[requested] = self._choose(requested, own, num_sequences)
        return served

    def is_due(self, *, is_idle: bool, is_owed: bool = False) -> bool:
        """Whether to warm up a shape now.

        Args:
            is_idle: no sequence is open.
            is_owed: a target waits for a tree.
        """
        while self._wanted:
            shape, num_sequences = next(iter(self._wanted.items()))
            if not self._drafter.is_prepared(shape, num_sequences):
                return is_idle or self._clock() >= self._begins_s(is_owed=is_owed)
            del self._wanted[shape]
        return False

    def _begins_s(self, *, is_owed: bool) -> float:
        """Returns when the next warm-up may begin."""
        return max(self._not_before_s, self._put_off_s) if is_owed else self._not_before_s

    def advance(self) -> None:
        """Makes one graph of the shape requested last; only if `is_due`."""
        shape, num_sequences = next(iter(self._wanted.items()))
        self._warm(lambda: self._drafter.prepare_for(shape, num_sequences))

    def ensure(self, shape: TreeShape, num_sequences: int) -> None:
        """Makes all missing graphs of a shape that is used now."""

        def prepare() -> None:
            while self._drafter.prepare_for(shape, num_sequences):
                pass

        if not self._drafter.is_prepared(shape, num_sequences):
            self._warm(prepare)

    def prepare_next(self, shape: TreeShape) -> bool:
        """Makes one graph while the draft is idle; returns whether one was missing. Only the
        drafter knows, so targets are told from the second graph on."""
        if not self._is_idling:
            self._is_idling = self._drafter.prepare_next(shape)
        else:
            self._warm(lambda: self._idle(shape))
        return self._is_idling

    def _idle(self, shape: TreeShape) -> None:
        self._is_idling = self._drafter.prepare_next(shape)

    def _choose(self, requested: TreeShape, own: TreeShape, num_sequences: int) -> TreeShape:
        for shape in filter(None, (requested, self._last, own)):
            if self._drafter.is_prepared(shape, num_sequences):
                self._last = shape
                return shape
            self._want(shape, num_sequences)
        # No shape is ready, so this one waits for its warm-up.
        return own

    def _want(self, shape: TreeShape, num_sequences: int) -> None:
        if not self._wanted:
            self._put_off_s = self._clock() + LONGEST_PUT_OFF_S
        self._wanted[shape] = max(num_sequences, self._wanted.get(shape, 0))
        self._wanted.move_to_end(shape, last=False)
        while len(self._wanted) > MOST_WANTED:
            self._wanted.popitem()

    def _warm(self, prepare: Callable[[], object]) -> None:
        """Runs a warm-up; targets do not wait for trees meanwhile."""
        start_s, self.is_warming = self._clock(), True
        self._announce()
        prepare()
        end_s, self.is_warming = self._clock(), False
        self.last_s = end_s - start_s
        self._not_before_s = end_s + self.last_s * (1.0 / PREPARED_SHARE - 1.0)
        self._put_off_s = self._not_before_s + LONGEST_PUT_OFF_S
        self._announce()
