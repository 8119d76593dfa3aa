"""Small tensors of the host on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def uploaded(host: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device. Goes through pinned memory: the host waits neither for the
    copy nor for what is queued before it, as it would for `torch.tensor(..., device=device)`."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def uploaded_ids(ids: Sequence[int], device: torch.device) -> Tensor:
    """Returns `[N]` int64 on the device; see `uploaded`."""
    return uploaded(torch.tensor(ids, dtype=torch.int64), device)
