"""Memory of the host that is kept is not written again before it was read."""

from __future__ import annotations

import pytest
import torch

from shared.runtime.host_copy import HostCopy, PinnedMemory, UploadMemory, UploadRing

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000


def test_work_between_copies_reads_what_was_copied_before_it() -> None:
    """More copies than there is memory for, each behind a kernel that takes long."""
    target = torch.zeros(200, dtype=torch.int64, device="cuda")
    ring, read = UploadRing(target), []
    for number in range(1, 8):
        torch.cuda._sleep(CYCLES)
        event = ring.copy([number] * 100)
        assert event is not None
        read.append(target[:100].clone())
    assert [each.unique().tolist() for each in read] == [[number] for number in range(1, 8)]


def test_a_copy_to_kept_memory_is_there_once_it_was_waited_for() -> None:
    memory = PinnedMemory(64, torch.int64)
    for number, shape in enumerate(((4, 16), (3, 5), (4, 16))):
        source = torch.zeros(shape, dtype=torch.int64, device="cuda")
        torch.cuda._sleep(CYCLES)
        source += number + 1
        copy = HostCopy(source, memory)
        assert not copy.is_done
        assert copy.read().tolist() == [[number + 1] * shape[1]] * shape[0]
        assert copy.is_done


def test_what_is_written_in_place_arrives_although_the_memory_is_written_again() -> None:
    """Each upload is behind a kernel that takes long; the third needs more memory."""
    memory, arrived = UploadMemory(torch.device("cuda")), []
    shapes = (4, 16), (3, 5), (100, 64), (4, 16)
    for number, shape in enumerate(shapes, 1):
        array = memory.array(shape)
        array[:] = number
        torch.cuda._sleep(CYCLES)
        arrived.append(memory.uploaded(array))
    for number, (shape, tensor) in enumerate(zip(shapes, arrived, strict=True), 1):
        assert tensor.shape == shape
        assert tensor.unique().tolist() == [number]
