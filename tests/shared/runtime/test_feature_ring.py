"""Rows in memory that two processes share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shared.runtime import ring_memory
from shared.runtime.ring_memory import (
    FeatureRingReader,
    FeatureRings,
    FeatureRingWriter,
    RingAddress,
    RingUnavailable,
    host_id,
    open_memory,
)
from tests.helpers.ring_reader import DTYPE, NUM_ROWS, WIDTH, read_elsewhere, ring_rows

CPU = torch.device("cpu")


def _ring(num_rows: int = NUM_ROWS) -> FeatureRingWriter:
    return FeatureRings(torch.device("cpu")).open(num_rows, WIDTH, DTYPE)


def _reader(ring: FeatureRingWriter) -> FeatureRingReader:
    return FeatureRingReader(ring.address, ring.num_rows, WIDTH, DTYPE, CPU)


def test_rows_come_out_as_they_went_in_however_often_the_ring_turns() -> None:
    ring = _ring()
    reader = _reader(ring)
    first = 0
    for count in (3, 5, 1, 8, 2, 7):
        freed = reader.freed()
        ring.free(first if freed is None else freed)
        assert ring.write(ring_rows(first, count)) == first
        assert torch.equal(reader.read(first, count), ring_rows(first, count))
        first += count


def test_nothing_is_written_before_the_draft_reads() -> None:
    ring = _ring()
    assert ring.write(ring_rows(0, 1)) is None
    ring.free(0)
    assert ring.write(ring_rows(0, 1)) == 0


def test_rows_that_are_not_freed_are_not_overwritten() -> None:
    ring = _ring()
    reader = _reader(ring)
    ring.free(0)
    assert ring.write(ring_rows(0, 6)) == 0
    assert ring.write(ring_rows(6, 3)) is None
    assert torch.equal(reader.read(0, 6), ring_rows(0, 6))
    ring.free(6)
    assert ring.write(ring_rows(6, 8)) == 6
    assert ring.write(ring_rows(14, 1)) is None


def test_a_quarter_of_the_ring_is_freed_at_a_time() -> None:
    ring = _ring(16)
    reader = _reader(ring)
    assert reader.freed() == 0
    ring.free(0)
    ring.write(ring_rows(0, 8))
    reader.read(0, 3)
    assert reader.freed() is None
    reader.read(3, 1)
    assert reader.freed() == 4
    assert reader.freed() is None


def test_rows_are_not_freed_before_those_in_front_are_read() -> None:
    """Rows of several sequences lie one after the other, and come in another order: what is from
    before a verdict comes first."""
    ring = _ring(16)
    reader = _reader(ring)
    reader.freed()
    ring.free(0)
    ring.write(ring_rows(0, 12))
    reader.read(6, 5)
    reader.read(0, 5)
    assert reader.freed() == 5
    reader.read(5, 1)
    reader.read(5, 0)
    assert reader.freed() == 11


@pytest.mark.parametrize("end", [-1, 5])
def test_what_was_never_written_cannot_be_freed(end: int) -> None:
    ring = _ring()
    ring.free(0)
    ring.write(ring_rows(0, 4))
    with pytest.raises(ValueError, match=f"rows up to {end} were freed; 0 to 4 can be"):
        ring.free(end)


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, 9), (0, -1)])
def test_rows_that_no_ring_holds_are_refused(start: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} rows from {start}; the ring has 8"):
        _reader(_ring()).read(start, count)


def test_another_process_reads_thering_rows() -> None:
    read_elsewhere(_ring(), "cpu")


def test_the_file_goes_with_the_ring() -> None:
    ring = _ring()
    path = Path("/dev/shm") / f"outrider-{ring.address.shared_file}"
    assert path.stat().st_size == 8 * WIDTH * DTYPE.itemsize
    assert path.stat().st_mode & 0o077 == 0
    del ring
    assert not path.exists()


def test_the_file_has_no_name_any_more_once_the_draft_has_opened_it() -> None:
    """So that nothing is left of it if the target is killed."""
    ring = _ring()
    path = Path("/dev/shm") / f"outrider-{ring.address.shared_file}"
    reader = _reader(ring)
    assert path.exists()
    ring.free(0)
    assert not path.exists()
    assert ring.write(ring_rows(0, 5)) == 0
    assert torch.equal(reader.read(0, 5), ring_rows(0, 5))
    with pytest.raises(RingUnavailable):
        _reader(ring)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "0" * 32])
def test_only_memory_of_a_target_is_opened(name: str) -> None:
    with pytest.raises(RingUnavailable):
        open_memory(RingAddress(shared_file=name), 16, CPU)


def test_memory_that_is_too_small_is_not_opened() -> None:
    with pytest.raises(RingUnavailable):
        open_memory(_ring().address, 1 << 20, CPU)


def test_a_host_has_one_name() -> None:
    assert host_id() == host_id() != ""


def test_a_gpus_ring_is_copied_on_the_gpu_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """This thread's own device is the first GPU; the draft's is the second."""
    current = [0]
    copies: list[tuple[int, ...]] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    def copy(out: int, source: int, num_bytes: int, kind: str, stream: str) -> tuple[int]:
        copies.append((current[0], source, num_bytes))
        assert (kind, stream) == ("any", "stream of 1")
        return (0,)

    runtime = SimpleNamespace(
        cudaIpcMemHandle_t=SimpleNamespace,
        cudaIpcMemLazyEnablePeerAccess=1,
        cudaIpcOpenMemHandle=lambda handle, flags: (0, 4096 * current[0]),
        cudaIpcCloseMemHandle=lambda pointer: None,
        cudaMemcpyKind=SimpleNamespace(cudaMemcpyDefault="any"),
        cudaMemcpyAsync=copy,
    )
    monkeypatch.setattr(ring_memory, "_cuda_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda: SimpleNamespace(cuda_stream=f"stream of {current[0]}"),
    )
    address, device = RingAddress(cuda_ipc_handle=b"handle"), torch.device("cuda", 1)
    memory = open_memory(address, 16, device)
    memory.copy(8, torch.empty((2, 4), dtype=DTYPE))
    assert memory.device == device
    assert copies == [(1, 4096 + 8, 16)]


def test_copies_are_over_when_the_rings_own_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[object] = []
    event = SimpleNamespace(record=recorded.append)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    assert ring_memory._recorded(torch.device("cuda", 1)) is event
    assert recorded == [("stream of", torch.device("cuda", 1))]
