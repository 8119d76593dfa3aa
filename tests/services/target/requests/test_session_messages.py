"""A session's events on the wire: tokens as columns, everything else as messages, in order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway import generation
from gateway.target_link import events_from_response
from services.target.requests.generate_service import session_responses
from services.target.requests.request import Event, Finished
from shared.errors import QueueFull
from shared.generation import Delta, Failed, SpeculationStats, Started
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.tokens import FinishReason, TokenLogprobs

STARTED = Started(3, 0.5)
FINISHED = Finished(FinishReason.LENGTH, 1, 2, 3, None, SpeculationStats())
PLAIN = Delta((5, 6, 7), (), 2, 4)

plain = st.builds(
    Delta,
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4).map(tuple),
    st.just(()),
    st.integers(0, 3),
    st.integers(0, 256),
)
events = st.one_of(
    plain,
    plain.map(lambda delta: replace(delta, weight_version="second")),
    plain.map(
        lambda delta: replace(
            delta, logprobs=tuple(TokenLogprobs(-0.5, 1, ((1, -0.5),)) for _ in delta.token_ids)
        )
    ),
    st.just(STARTED),
    st.just(FINISHED),
    st.just(Failed(QueueFull("full", reason="QUEUE_FULL"))),
)


def _sent(batch: list[tuple[int, Event]]) -> list[pb.SessionResponse]:
    messages = [response.SerializeToString() for response in session_responses(batch)]
    return [pb.SessionResponse.FromString(message) for message in messages]


def _told(event: Event | generation.Event) -> tuple[object, ...]:
    """Returns what both sides' events have in common."""
    if isinstance(event, Delta | generation.Delta):
        logprobs = [each.top for each in event.logprobs]
        counts = (event.num_accepted, event.num_drafted)
        return ("Delta", *event.token_ids, *counts, event.weight_version, logprobs)
    return (type(event).__name__,)


@given(st.lists(st.tuples(st.integers(1, 3), events), max_size=12))
def test_every_event_arrives_once_and_in_order(batch: list[tuple[int, Event]]) -> None:
    received = [each for message in _sent(batch) for each in events_from_response(message)]
    for key in {key for key, _ in batch}:
        sent = [_told(event) for request_id, event in batch if request_id == key]
        assert [_told(event) for request_id, event in received if request_id == key] == sent
    assert len(received) == len(batch)


def test_tokens_of_a_step_are_columns_of_one_message() -> None:
    (message,) = _sent([(key, PLAIN) for key in range(256)])
    assert not message.events
    assert message.deltas.request_ids[:] == list(range(256))
    assert message.deltas.token_ids[:3] == [5, 6, 7]


def test_a_delta_after_an_event_of_its_request_begins_a_message() -> None:
    first, second = _sent([(1, PLAIN), (2, STARTED), (1, PLAIN), (2, PLAIN), (2, FINISHED)])
    assert first.deltas.request_ids[:] == [1, 1]
    assert second.deltas.request_ids[:] == [2]
    assert [event.request_id for event in second.events] == [2]


def test_no_events_are_no_message() -> None:
    assert not _sent([])
