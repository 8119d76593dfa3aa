"""A capture is not disturbed by garbage, and leaves the collector as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from shared.runtime.capture import capturing


@contextmanager
def _no_capture(graph: object, **options: object) -> Iterator[None]:
    yield


@pytest.fixture(autouse=True)
def _without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph", _no_capture)


def _graph() -> torch.cuda.CUDAGraph:
    return object.__new__(torch.cuda.CUDAGraph)


def test_nothing_is_collected_meanwhile() -> None:
    with capturing(_graph(), None):
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collector_is_on_again_after_a_failure() -> None:
    with pytest.raises(ValueError, match="broken"), capturing(_graph(), None):
        raise ValueError("broken")
    assert gc.isenabled()


def test_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with capturing(_graph(), None):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
