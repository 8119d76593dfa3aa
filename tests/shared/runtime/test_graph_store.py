"""Graphs that do not fit are gone without, but never by one process of several."""

from __future__ import annotations

import pytest
import torch

from shared.runtime.graphs import GraphStore
from shared.runtime.memory import Shortage


def _advise(shortage: Shortage) -> str:
    return f"{shortage}, so lower something"


class _Device:
    """Has memory for a few graphs, which are numbers here."""

    def __init__(self, num_fitting: int, error: RuntimeError | None = None) -> None:
        self.num_fitting = num_fitting
        self.error = error or torch.OutOfMemoryError("Tried to allocate 64.00 MiB")
        self.asked: list[int] = []

    def capture(self, key: int) -> int:
        self.asked.append(key)
        if len(self.asked) > self.num_fitting:
            raise self.error
        return 10 * key


def test_a_graph_is_captured_once() -> None:
    device = _Device(num_fitting=5)
    store = GraphStore(device.capture, is_shared=False, advise=_advise)
    assert [store.of(key) for key in (1, 2, 1)] == [10, 20, 10]
    assert device.asked == [1, 2]
    assert set(store) == {1, 2}
    assert 1 in store
    assert 3 not in store


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 64.00 MiB"),
        RuntimeError("CUDA error: out of memory, allocate 64.00 MiB"),
    ],
    ids=["allocator", "driver"],
)
def test_graphs_go_on_without_those_that_do_not_fit(
    error: RuntimeError, caplog: pytest.LogCaptureFixture
) -> None:
    device = _Device(num_fitting=2, error=error)
    store = GraphStore(device.capture, is_shared=False, advise=_advise)
    assert [store.of(key) for key in (1, 2, 3, 4, 1)] == [10, 20, None, None, 10]
    assert device.asked == [1, 2, 3], "it is not tried again"
    assert "no memory for more than 2 CUDA graphs; other steps run without" in caplog.text
    assert "64.00 MiB more wanted, so lower something" in caplog.text


def test_of_several_processes_none_goes_on_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The others wait for it in the middle of the graph; it has to fail, and be seen to."""
    store = GraphStore(_Device(num_fitting=1).capture, is_shared=True, advise=_advise)
    assert store.of(1) == 10
    with pytest.raises(torch.OutOfMemoryError):
        store.of(2)
    assert "no memory for CUDA graph 2 of the group: 64.00 MiB more wanted" in caplog.text
    assert not store.is_full
