"""What asks for work is bounded; what ends work always arrives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.target.engine import Engine, Inbox
from services.target.requests.request import ModelLimits
from shared.errors import EngineFailed, OutriderError, QueueFull, Unavailable
from shared.generation import Failed
from shared.models.decoder import Decoder
from tests.helpers.engines import Collector, build_engine, request, settle, tiny_decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


def test_commands_run_in_the_order_they_were_posted() -> None:
    inbox, ran = Inbox(8), []
    for number in range(3):
        inbox.post(lambda number=number: ran.append(number))
    inbox.post_end(lambda: ran.append(3))
    assert inbox.call(lambda: len(ran)).done() is False
    inbox.run_all()
    assert ran == [0, 1, 2, 3]


def test_full_inbox_refuses_work_and_takes_its_end() -> None:
    inbox, ran = Inbox(2), []
    for number in range(2):
        inbox.post(lambda number=number: ran.append(number))
    with pytest.raises(QueueFull, match="the queue holds 2"):
        inbox.post(lambda: ran.append(9))
    inbox.post_end(lambda: ran.append(2))
    inbox.run_all()
    assert ran == [0, 1, 2]


def test_what_a_call_raises_reaches_its_caller() -> None:
    inbox = Inbox(2)

    def fail() -> None:
        raise KeyError("x")

    future = inbox.call(fail)
    inbox.run_all()
    with pytest.raises(KeyError):
        future.result(timeout=0)


def test_a_waiting_engine_is_woken_by_a_command() -> None:
    inbox, ran = Inbox(2), []
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(inbox.run_all, wait_s=None)
        inbox.post(lambda: ran.append(1))
        waiting.result()
    assert ran == [1]


def test_closed_inbox_refuses_work_and_still_runs_what_came_before() -> None:
    inbox, ran = Inbox(2), []
    inbox.post(lambda: ran.append(1))
    inbox.close(Unavailable.draining)
    inbox.close(EngineFailed.of)
    for ask in (inbox.post, inbox.call):
        with pytest.raises(Unavailable):
            ask(lambda: ran.append(9))
    inbox.post_end(lambda: ran.append(2))
    inbox.run_all()
    assert ran == [1, 2]


def _stop(engine: Engine) -> None:
    engine.stop()
    engine._run()


def _break(engine: Engine) -> None:
    def fail() -> None:
        raise RuntimeError("broken on purpose")

    engine._inbox.post(fail)
    engine._run()


@pytest.mark.parametrize(("end", "error"), [(_stop, Unavailable), (_break, EngineFailed)])
def test_nobody_waits_for_an_engine_that_ended_meanwhile(
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Engine], None],
    error: type[OutriderError],
) -> None:
    """A request is either refused or told how it ended, wherever between it finds the end."""
    engine, sink = build_engine(decoder), Collector()
    engine.submit(request([1, 2, 3]), sink, 0)
    monkeypatch.setattr(ModelLimits, "check", lambda self, asked: end(engine))
    with pytest.raises(error):
        engine.submit(request([1, 2, 3]), sink, 1)
    with pytest.raises(error):
        engine.gauges()
    [told] = sink.events[0]
    assert isinstance(told, Failed)
    assert isinstance(told.error, error)


def test_commands_that_fail_behind_a_failure_leave_nobody_without_an_answer(
    decoder: Decoder,
) -> None:
    """They may need what the failure has broken."""
    engine, sink = build_engine(decoder), Collector()

    def fail() -> None:
        raise RuntimeError("broken on purpose")

    for key in range(3):
        engine._inbox.post(fail)
        engine.submit(request([1, 2, 3]), sink, key)
    engine._run()
    assert engine.has_failed
    for key in range(3):
        assert isinstance(sink.failure(key).error, EngineFailed)


def test_cancel_reaches_an_engine_whose_inbox_is_full(decoder: Decoder) -> None:
    engine, sink = build_engine(decoder), Collector()
    engine._inbox = inbox = Inbox(1)
    engine.submit(request([1, 2, 3]), sink, 0)
    engine.step()
    inbox.post(lambda: None)
    with pytest.raises(QueueFull):
        engine.submit(request([1]), sink, 1)
    engine.cancel(sink, 0)
    engine.step()
    settle(engine)
    assert engine.gauges_now().num_running == 0
