"""Forwards of small batches through `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch

from shared.kv.batch import ForwardBatch

P = ParamSpec("P")
R = TypeVar("R")
Forward = Callable[Concatenate[ForwardBatch, P], R]


def compile_small(
    forward: Forward[P, R], max_sequences: int | None, *, backend: str = "inductor"
) -> Forward[P, R]:
    """Returns `forward`, compiled for batches of up to `max_sequences`; None leaves it as it is.

    The first call of each kind compiles, for seconds to a minute. Sizes are symbols, so that a
    batch of another size is nothing new. What cannot be traced, such as plans made on the host,
    runs between the compiled parts.

    Args:
        backend: what compiles the traced parts.
    """
    if max_sequences is None:
        return forward
    compiled: Forward[P, R] = torch.compile(forward, dynamic=True, backend=backend)

    def dispatch(batch: ForwardBatch, /, *args: P.args, **kwargs: P.kwargs) -> R:
        is_small = len(batch.kv_lengths) <= max_sequences
        return (compiled if is_small else forward)(batch, *args, **kwargs)

    return dispatch
