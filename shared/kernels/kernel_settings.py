"""Reads from the environment whether Triton's kernels run on CUDA or in Triton's interpreter.

The interpreter computes a kernel's programs one after the other with numpy: far too slow to serve,
and right to test the kernels where there is no GPU. `TRITON_INTERPRET=1` asks for it.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

# Triton reads the variable as well, when a kernel is defined.
IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(tensor: Tensor) -> bool:
    """Whether kernels take `tensor`, rather than plain torch."""
    return tensor.is_cuda or IS_INTERPRETING


def has_triton(device: torch.device) -> bool:
    """Whether kernels run on `device`."""
    return device.type == "cuda" or IS_INTERPRETING
