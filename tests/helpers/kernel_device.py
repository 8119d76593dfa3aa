"""Where tests run Triton's kernels: on a GPU, or some of them in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Container, Iterable
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
