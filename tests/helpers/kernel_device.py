"""Where tests run Triton's kernels: on a GPU, or some of them in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest
import torch

from shared.kernels.kernel_settings import IS_INTERPRETING


def kernel_device() -> torch.device:
    """Returns the CPU in Triton's interpreter, else a GPU."""
    return torch.device("cpu" if IS_INTERPRETING else "cuda")


def some_interpreted(cases: Iterable[Any], interpreted: Container[Any]) -> list[Any]:
    """Returns the parameters of all cases; `make test-kernels` selects those in `interpreted`.

    The interpreter takes seconds to minutes for a case. GPUs run all of them.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.interpreter if case in interpreted else (),
        )
        for case in cases
    ]


def crossed(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns all combinations of the parameters' values; in the interpreter every second one. Any
    two values of two parameters still meet, if a third parameter has two values."""
    numbered = itertools.product(*(enumerate(each) for each in values))
    return [
        tuple(value for _, value in case)
        for case in numbered
        if not IS_INTERPRETING or sum(number for number, _ in case) % 2 == 0
    ]
