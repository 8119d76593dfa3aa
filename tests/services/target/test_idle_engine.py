"""What an engine does when nobody asks it for anything."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from services.target.engine import Engine
from services.target.requests.request import Event
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.runner import ModelRunner
from shared.tokens import SamplingParams, StopParams
from tests.helpers.engines import Collector, build_engine, request, tiny_decoder

NUM_LEFT = 3


class _UnreadyRunner(ModelRunner):
    """Has something to prepare a few times; each time it waits to be let on."""

    def __init__(self, decoder: Decoder, pool: KvPool) -> None:
        super().__init__(decoder, pool)
        self.num_prepared = 0
        self.is_asked = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0)

    def prepare_next(self) -> bool:
        if self.num_prepared == NUM_LEFT:
            self.is_asked.release()
            return False
        self.is_asked.release()
        assert self.may_go_on.acquire(timeout=60.0)
        self.num_prepared += 1
        return True


class _Listener(Collector):
    """Lets a test wait for the end of a request."""

    def __init__(self) -> None:
        super().__init__()
        self.has_finished = threading.Event()

    def deliver(self, events: Sequence[tuple[int, Event]]) -> None:
        super().deliver(events)
        if self.has_ended(0):
            self.has_finished.set()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = build_engine(tiny_decoder(tmp_path), make_runner=_UnreadyRunner)
    yield engine
    engine.stop()


def _runner(engine: Engine) -> _UnreadyRunner:
    runner = engine._loop._launcher._runner
    assert isinstance(runner, _UnreadyRunner)
    return runner


def test_a_request_comes_before_what_is_left_to_prepare(engine: Engine) -> None:
    runner, listener = _runner(engine), _Listener()
    engine.start()
    assert runner.is_asked.acquire(timeout=60.0)
    engine.submit(request([1, 2, 3], SamplingParams(), StopParams(4)), listener, 0)
    runner.may_go_on.release()
    assert listener.has_finished.wait(60.0)
    assert runner.num_prepared == 1
    for _ in range(1, NUM_LEFT):
        assert runner.is_asked.acquire(timeout=60.0)
        runner.may_go_on.release()
    assert runner.is_asked.acquire(timeout=60.0)
    assert runner.num_prepared == NUM_LEFT


def test_an_engine_is_stopped_with_something_left_to_prepare(engine: Engine) -> None:
    runner = _runner(engine)
    engine.start()
    assert runner.is_asked.acquire(timeout=60.0)
    runner.may_go_on.release(NUM_LEFT)
    engine.stop()
    assert not engine.has_failed


def test_an_idle_engine_does_not_walk_its_pages(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be millions of them, and the next request would wait for it."""
    walks: list[KvLeases] = []
    monkeypatch.setattr(KvLeases, "check", lambda leases: walks.append(leases))
    runner, listener = _runner(engine), _Listener()
    engine.start()
    engine.submit(request([1, 2, 3], SamplingParams(), StopParams(4)), listener, 0)
    runner.may_go_on.release(NUM_LEFT)
    assert listener.has_finished.wait(60.0)
    for _ in range(NUM_LEFT + 1):
        assert runner.is_asked.acquire(timeout=60.0)
    assert not walks
    engine.check_idle()
    assert walks
