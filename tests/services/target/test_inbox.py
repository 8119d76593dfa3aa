"""What asks for work is bounded; what ends work always arrives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.target.engine import Engine
from services.target.requests.request import ModelLimits
from shared.errors import EngineFailed, OutriderError, QueueFull, Unavailable
from shared.generation import Failed
from shared.inbox import Inbox
from shared.models.decoder import Decoder
from tests.helpers.engines import Collector, build_engine, request, settle, tiny_decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


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
