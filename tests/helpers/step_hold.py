"""An engine that stops in the middle of an output until a test has done something to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from services.target.process import TargetProcess

P = ParamSpec("P")
T = TypeVar("T")

_NUM_TOKENS = 3


class Hold:
    """Attributes:
    is_held: whether steps wait now.
    """

    def __init__(self, target: TargetProcess, times: int) -> None:
        self.is_held = False
        self._loop = loop = target._engine._loop
        self._num_left = times
        self._counts_before: dict[int, int] = {}  # when steps went on
        self._step, weights = loop.step, loop.weights
        loop.step = self._held_step  # type: ignore[method-assign]
        loop.cancel = self._releasing(loop.cancel)  # type: ignore[method-assign]
        weights.pause = self._releasing(weights.pause)  # type: ignore[method-assign]
        weights.apply = self._releasing(weights.apply)  # type: ignore[method-assign]

    def _held_step(self) -> bool:
        self.is_held = self._num_left > 0 and any(
            count >= self._counts_before.get(sequence_id, 0) + _NUM_TOKENS
            for sequence_id, count in self._counts().items()
        )
        if not self.is_held:
            return self._step()
        self._loop._send_results()
        return False

    def _counts(self) -> dict[int, int]:
        """Returns the output tokens of each sequence that runs."""
        running = self._loop._scheduler.running
        return {each.sequence_id: each.num_output_tokens for each in running}

    def release(self) -> None:
        """Lets steps run on."""
        self._counts_before = self._counts()
        self._num_left -= 1
        self.is_held = False

    def _releasing(self, call: Callable[P, T]) -> Callable[P, T]:
        def call_and_release(*args: P.args, **kwargs: P.kwargs) -> T:
            result = call(*args, **kwargs)
            self.release()
            return result

        return call_and_release


def hold_outputs(target: TargetProcess, *, times: int = 1) -> Hold:
    """Stops all steps once an output has some tokens, so that no request can end before generation
    is paused, new weights are in force or a request is cancelled. Then steps run on: as before, or
    until an output has as many tokens more, if they are to stop several times."""
    return Hold(target, times)
