"""An engine that stops in the middle of an output until a test has done something to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from services.target.process import TargetProcess

P = ParamSpec("P")
T = TypeVar("T")


def hold_outputs(target: TargetProcess, num_tokens: int = 3) -> None:
    """Stops all steps once an output has `num_tokens` tokens, so that no request can end before
    generation is paused or new weights are in force. Then steps run as before."""
    loop = target._engine._loop
    step, weights = loop.step, loop.weights
    is_held = True

    def held_step() -> bool:
        running = loop._scheduler.running
        if is_held and any(sequence.num_output_tokens >= num_tokens for sequence in running):
            loop._send_results()
            return False
        return step()

    def releasing(call: Callable[P, T]) -> Callable[P, T]:
        def call_and_release(*args: P.args, **kwargs: P.kwargs) -> T:
            nonlocal is_held
            result = call(*args, **kwargs)
            is_held = False
            return result

        return call_and_release

    loop.step = held_step  # type: ignore[method-assign]
    weights.pause = releasing(weights.pause)  # type: ignore[method-assign]
    weights.apply = releasing(weights.apply)  # type: ignore[method-assign]
