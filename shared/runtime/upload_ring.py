"""Async host-to-device copies into the start of a fixed tensor, through pinned memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.runtime.host_copy import PinnedMemory

_NUM_UNDER_WAY = 2
"""Copies in flight of one size before the host waits for the oldest."""
_LEAST = 64


@dataclass(frozen=True, slots=True)
class _Part:
    """The first elements of the target, and on a GPU pinned buffers of that size, oldest first."""

    target: Tensor
    memory: deque[PinnedMemory]

    @classmethod
    def of(cls, target: Tensor) -> _Part:
        count = _NUM_UNDER_WAY if target.is_cuda else 0
        return cls(target, deque(PinnedMemory(len(target), target.dtype) for _ in range(count)))


class UploadRing:
    """Copies through buffers that are reused, one set for each of a few sizes.

    Args:
        target: `[N]` int64.
    """

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._parts: dict[int, _Part] = {}

    def copy(self, numbers: Sequence[int]) -> torch.cuda.Event | None:
        """Queues a copy of the numbers on the current stream, without waiting for it. The elements
        after them are undefined then.

        Returns:
            An event after the copy, valid until the second next call; None on a CPU.
        """
        part = self._part(len(numbers))
        if not part.memory:
            part.target.numpy()[: len(numbers)] = numbers
            return None
        memory = part.memory[0]
        part.memory.rotate(-1)
        memory.wait()
        host = memory.of(part.target.shape)
        host.numpy()[: len(numbers)] = numbers
        part.target.copy_(host, non_blocking=True)
        return memory.queued()

    def _part(self, size: int) -> _Part:
        """Returns the smallest part that holds `size` numbers."""
        padded = min(max(_LEAST, 1 << (size - 1).bit_length()), len(self._target))
        if padded not in self._parts:
            self._parts[padded] = _Part.of(self._target[:padded])
        return self._parts[padded]
