"""A capture is not disturbed by garbage, and leaves the collector as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import torch

from shared.runtime.graphs import capturing


@contextmanager
def _no_capture(graph: object, **options: object) -> Iterator[None]:
    yield


@contextmanager
def _endless_capture(graph: object, **options: object) -> Iterator[None]:
    yield
    raise RuntimeError("the capture cannot end")


class Streams:
    """Attributes:
    left: those that threads came back from.
    """

    def __init__(self) -> None:
        self.left: list[str] = []

    @contextmanager
    def entered(self, stream: str) -> Iterator[None]:
        try:
            yield
        finally:
            self.left.append(stream)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "graph", _no_capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the thread's own")
    monkeypatch.setattr(torch.cuda, "stream", streams.entered)
    return streams


def _graph() -> torch.cuda.CUDAGraph:
    return cast(torch.cuda.CUDAGraph, object())


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


def test_thread_is_back_on_its_stream_when_a_capture_cannot_end(
    monkeypatch: pytest.MonkeyPatch, streams: Streams
) -> None:
    monkeypatch.setattr(torch.cuda, "graph", _endless_capture)
    with pytest.raises(RuntimeError, match="cannot end"), capturing(_graph(), None):
        pass
    assert streams.left == ["the thread's own"]
