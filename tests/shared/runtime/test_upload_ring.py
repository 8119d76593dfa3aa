"""What is copied lies at the beginning of the target, however much it is."""

from __future__ import annotations

import torch

from shared.runtime.host_copy import UploadMemory, UploadRing


def test_each_copy_replaces_the_beginning_of_the_target() -> None:
    target = torch.zeros(200, dtype=torch.int64)
    ring = UploadRing(target)
    for size in (3, 64, 65, 200, 1, 130):
        numbers = list(range(size, 2 * size))
        assert ring.copy(numbers) is None
        assert target[:size].tolist() == numbers


def test_what_was_uploaded_stays_when_the_next_array_is_written() -> None:
    memory = UploadMemory(torch.device("cpu"))
    first = memory.array((2, 3))
    first[:] = 7
    uploaded = memory.uploaded(first)
    memory.array((2, 3))[:] = 8
    assert uploaded.tolist() == [[7] * 3] * 2
