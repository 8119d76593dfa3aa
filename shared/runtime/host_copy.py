"""A tensor on its way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Starts to copy a tensor behind the work queued so far, without waiting for any of it.

    Tensors of the host are taken as they are: nothing may write to them before `read`.
    """

    def __init__(self, source: Tensor) -> None:
        self._host = source
        self._is_done: torch.cuda.Event | None = None
        if source.is_cuda:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._is_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_done.record()

    @property
    def is_done(self) -> bool:
        """Whether `read` would not wait."""
        return self._is_done is None or bool(self._is_done.query())  # type: ignore[no-untyped-call]

    def read(self) -> Tensor:
        """Waits until the copy is there and returns it."""
        if self._is_done is not None:
            self._is_done.synchronize()
        return self._host
