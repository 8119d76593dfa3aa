"""The device on which tests run Triton's kernels."""

from __future__ import annotations

import torch

from shared.kernels.kernel_settings import IS_INTERPRETING


def kernel_device() -> torch.device:
    """Returns the CPU in Triton's interpreter, else a GPU."""
    return torch.device("cpu" if IS_INTERPRETING else "cuda")
