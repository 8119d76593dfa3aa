"""The engine's thread: events in, outputs out, failure and end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from services.draft.engine import DraftEngine
from services.draft.events import (
    CandidatesReady,
    LinkTerms,
    Output,
    RoundResult,
    RoundsDecided,
    SequencesClosed,
    SequencesOpened,
)
from shared.errors import EngineFailed, QueueFull
from shared.tokens import OpenedSequence, Outcome, SamplingParams, TokenTree, TreeShape, Verdict
from tests.services.draft.scripted_drafter import ScriptedDrafter

SHAPE = TreeShape(num_steps=2, topk=1, num_draft_tokens=3)
TERMS = LinkTerms(1_000, 64, 100, mirrors_noise=True)
WAIT_S = 60.0


def _engine(
    drafter: ScriptedDrafter,
    *,
    max_waiting_events: int = 100,
    enter_thread: Callable[[], None] | None = None,
) -> DraftEngine:
    return DraftEngine(
        drafter,
        SHAPE,
        chunk_tokens=100,
        max_sequences=10,
        max_waiting_events=max_waiting_events,
        enter_thread=enter_thread,
    )


@pytest.fixture
def drafter() -> ScriptedDrafter:
    return ScriptedDrafter(num_slots=3)


@pytest.fixture
def engine(drafter: ScriptedDrafter) -> Iterator[DraftEngine]:
    engine = _engine(drafter)
    engine.start()
    yield engine
    engine.stop()


def _opened(link: int, sequence_id: int = 1, num_tokens: int = 5) -> SequencesOpened:
    opening = OpenedSequence(sequence_id, [1] * num_tokens, num_tokens, SamplingParams(), 0)
    return SequencesOpened(link, (opening,))


def _trees(output: Output) -> list[tuple[int, int, tuple[int, ...]]]:
    assert isinstance(output, CandidatesReady)
    return [(c.sequence_id, c.round, c.tree.token_ids) for c in output.candidates]


def test_candidates_come_back_on_the_link_they_belong_to(engine: DraftEngine) -> None:
    inboxes: list[queue.Queue[Output]] = [queue.Queue(), queue.Queue()]
    links = [engine.open_link(TERMS, inbox.put) for inbox in inboxes]
    for number, link in enumerate(links):
        engine.submit(_opened(link, num_tokens=5 + number))
    assert _trees(inboxes[0].get(timeout=WAIT_S)) == [(1, 0, (5, 6))]
    assert _trees(inboxes[1].get(timeout=WAIT_S)) == [(1, 0, (6, 7))]
    verdict = Verdict(1, 0, Outcome.MISSED, (), (9,), 7)
    engine.submit(RoundsDecided(links[1], (RoundResult(verdict),)))
    assert _trees(inboxes[1].get(timeout=WAIT_S)) == [(1, 1, (7, 8))]


def test_a_closed_link_ends_its_sequences(engine: DraftEngine) -> None:
    inbox: queue.Queue[Output] = queue.Queue()
    link = engine.open_link(TERMS, inbox.put)
    engine.submit(_opened(link))
    inbox.get(timeout=WAIT_S)
    engine.close_link(link)
    assert engine.gauges().result(WAIT_S) == {
        "sequence_count": 0.0,
        "unprepared_shape_count": 0.0,
        "tree_step_count": 2.0,
        "tree_topk": 1.0,
        "tree_draft_token_count": 3.0,
        "shape_is_pinned": 0.0,
        "outcome_budget": 0.0,
        "slot_count": 3.0,
    }


def test_a_probe_returns_a_tree_of_its_own_shape(engine: DraftEngine) -> None:
    shape = TreeShape(3, 1, 4)
    done = engine.propose_once((1, 2), SamplingParams(), shape).result(WAIT_S)
    assert done.tree == TokenTree.chain([2, 3, 4])
    assert done.draft_s > 0.0
    assert engine.gauges().result(WAIT_S)["sequence_count"] == 0.0


def test_a_probe_without_memory_returns_no_tree(engine: DraftEngine) -> None:
    inbox: queue.Queue[Output] = queue.Queue()
    link = engine.open_link(TERMS, inbox.put)
    for sequence_id in range(3):
        engine.submit(_opened(link, sequence_id))
        inbox.get(timeout=WAIT_S)
    assert engine.propose_once((1, 2), SamplingParams(), None).result(WAIT_S).tree is None
    assert engine.num_sequences == 3


def test_a_cancelled_probe_leaves_nothing_behind(drafter: ScriptedDrafter) -> None:
    engine = _engine(drafter)
    probe = engine.propose_once((1, 2), SamplingParams(), None)
    assert probe.cancel()
    engine.start()
    assert engine.gauges().result(WAIT_S)["sequence_count"] == 0.0
    assert drafter.batches == []
    engine.stop()


def test_the_shape_changes_between_steps(engine: DraftEngine) -> None:
    engine.set_shape(TreeShape(4, 1, 5), is_pinned=True).result(WAIT_S)
    done = engine.propose_once((1,), SamplingParams(), None).result(WAIT_S)
    assert done.tree is not None
    assert len(done.tree) == 4


def test_an_idle_engine_prepares_for_what_may_come(
    engine: DraftEngine, drafter: ScriptedDrafter
) -> None:
    drafter.num_left = 3
    assert engine.propose_once([1, 2], SamplingParams(), None).result(timeout=WAIT_S).tree
    assert drafter.num_left == 3
    engine.prepare_when_idle().result(timeout=WAIT_S)
    assert drafter.has_prepared.wait(WAIT_S)
    assert drafter.num_left == 0


def test_nothing_is_prepared_while_a_sequence_is_open(
    engine: DraftEngine, drafter: ScriptedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.draft.rounds.IDLE_S", 0.0)
    inbox: queue.Queue[Output] = queue.Queue()
    link = engine.open_link(TERMS, inbox.put)
    engine.submit(_opened(link))
    assert _trees(inbox.get(timeout=WAIT_S)) == [(1, 0, (5, 6))]
    drafter.num_left = 3
    engine.prepare_when_idle().result(timeout=WAIT_S)
    # Answered by the turn after the one that began.
    engine.gauges().result(timeout=WAIT_S)
    assert drafter.num_left == 3
    engine.submit(SequencesClosed(link, (1,)))
    assert drafter.has_prepared.wait(WAIT_S)


def test_flushing_reaches_the_drafter(engine: DraftEngine) -> None:
    assert engine.flush_prefix_cache().result(WAIT_S) == 7


def test_a_full_queue_refuses_events_but_never_the_end_of_a_link(
    drafter: ScriptedDrafter,
) -> None:
    engine = _engine(drafter, max_waiting_events=2)
    link = engine.open_link(TERMS, lambda output: None)
    engine.submit(_opened(link))
    with pytest.raises(QueueFull, match="2"):
        engine.submit(_opened(link, 2))
    with pytest.raises(QueueFull):
        engine.open_link(TERMS, lambda output: None)
    engine.close_link(link)
    engine.start()
    assert engine.gauges().result(WAIT_S)["sequence_count"] == 0.0
    engine.stop()


def test_an_operator_is_answered_while_verdicts_fill_the_queue(drafter: ScriptedDrafter) -> None:
    engine = _engine(drafter, max_waiting_events=2)
    link = engine.open_link(TERMS, lambda output: None)
    verdict = Verdict(1, 0, Outcome.MISSED, (), (9,), 7)
    engine.submit(RoundsDecided(link, (RoundResult(verdict),)))
    with pytest.raises(QueueFull):
        engine.submit(RoundsDecided(link, (RoundResult(verdict),)))
    flushed = engine.flush_prefix_cache()
    pinned = engine.set_shape(TreeShape(4, 1, 5), is_pinned=True)
    engine.start()
    assert flushed.result(WAIT_S) == 7
    pinned.result(WAIT_S)
    assert engine.shape.num_steps == 4
    engine.stop()


def test_a_failing_drafter_stops_the_engine_and_answers_everyone(
    drafter: ScriptedDrafter, caplog: pytest.LogCaptureFixture
) -> None:
    drafter.fails = True
    engine = _engine(drafter)
    engine.start()
    with pytest.raises(EngineFailed):
        engine.propose_once((1, 2), SamplingParams(), None).result(WAIT_S)
    engine.stop()
    assert engine.has_failed
    assert "scripted failure" in caplog.text
    with pytest.raises(EngineFailed):
        engine.submit(_opened(1))
    with pytest.raises(EngineFailed):
        engine.gauges()


def test_stopping_answers_what_is_left(drafter: ScriptedDrafter) -> None:
    engine = _engine(drafter)
    engine.start()
    engine.stop()
    assert not engine.has_failed
    with pytest.raises(EngineFailed):
        engine.propose_once((1, 2), SamplingParams(), None)


def test_the_thread_is_entered_before_anything_runs_on_it(drafter: ScriptedDrafter) -> None:
    entered: list[str] = []
    engine = _engine(drafter, enter_thread=lambda: entered.append(threading.current_thread().name))
    engine.start()
    engine.gauges().result(timeout=WAIT_S)
    assert entered == ["draft-engine"]
    engine.stop()


def test_an_engine_whose_thread_cannot_be_entered_has_failed(drafter: ScriptedDrafter) -> None:
    def refuse() -> None:
        raise RuntimeError("invalid device ordinal")

    engine = _engine(drafter, enter_thread=refuse)
    engine.start()
    engine.stop()
    assert engine.has_failed
