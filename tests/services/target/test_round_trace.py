"""A trace tells what the round did, costs nothing when nobody asks, and changes no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from services.target.drafts.attachment import DraftMessage
from services.target.engine import Engine
from services.target.requests.generate_service import response_message
from services.target.requests.request import GenerationRequest
from shared.errors import InvalidArgument
from shared.generation import Delta, DraftAnswer, RoundTrace, Started
from shared.models.decoder import Decoder
from shared.rpc.requests import tree_from_message
from shared.tokens import EMPTY_TREE, StopParams, TokenTree, Verdict
from tests.helpers.engines import (
    Clock,
    Collector,
    ScriptedDraft,
    build_engine,
    oracle_trees,
    request,
    run,
    tiny_decoder,
)

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("tiny"))


@dataclass
class _RecordingDraft(ScriptedDraft):
    """Keeps the verdicts it was sent."""

    verdicts: list[Verdict] = field(default_factory=list)

    def send(self, message: DraftMessage) -> bool:
        self.verdicts.extend(message.verdicts)
        return super().send(message)


def _traced(**changes: object) -> GenerationRequest:
    return replace(request(PROMPT), wants_trace=True, **changes)  # type: ignore[arg-type]


def _deltas(collector: Collector) -> list[Delta]:
    return [event for event in collector.events[0] if isinstance(event, Delta)]


def _traces(collector: Collector) -> list[RoundTrace]:
    traces = [delta.trace for delta in _deltas(collector)]
    assert all(trace is not None for trace in traces)
    return [trace for trace in traces if trace is not None]


def _answer(decoder: Decoder) -> list[int]:
    """The whole sequence, prompt and greedy output."""
    return PROMPT + run(build_engine(decoder), [request(PROMPT)]).token_ids(0)


def _with_oracle(
    decoder: Decoder, *, quality: float = 0.7, clock: Clock | None = None
) -> tuple[Engine, _RecordingDraft]:
    engine = build_engine(decoder, clock=clock)
    draft = _RecordingDraft(engine, oracle_trees([_answer(decoder)], 5, quality))
    draft.attach()
    return engine, draft


def _path_tokens(trace: RoundTrace) -> Sequence[int]:
    return [trace.tree.token_ids[node] for node in trace.accepted_nodes]


def test_trace_equals_the_verdicts(decoder: Decoder) -> None:
    engine, draft = _with_oracle(decoder)
    collector = run(engine, [_traced()])
    traces, deltas = _traces(collector), _deltas(collector)
    assert [trace.round for trace in traces] == list(range(len(traces)))
    by_round = {verdict.round: verdict for verdict in draft.verdicts}
    verified = 0
    for trace, delta in zip(traces, deltas, strict=True):
        assert list(delta.token_ids[: delta.num_accepted]) == _path_tokens(trace)
        assert delta.num_drafted == len(trace.tree)
        assert delta.num_accepted == len(trace.accepted_nodes)
        if trace.accepted_nodes:
            assert trace.tree.path(trace.accepted_nodes[-1]) == trace.accepted_nodes
            verified += 1
        verdict = by_round.get(trace.round)
        if verdict is not None:  # there is none for the round that ends the sequence
            assert verdict.accepted_node_indices == trace.accepted_nodes
            assert verdict.committed_token_ids == delta.token_ids
    assert len(by_round) == len(traces) - 1
    # Some rounds accept, or the comparison above said nothing.
    assert verified > 2


def test_rounds_follow_each_other_without_gaps(decoder: Decoder) -> None:
    clock = Clock()
    engine, _ = _with_oracle(decoder, clock=clock)
    collector = run(engine, [_traced()])
    [begin_s] = [each.queue_s for each in collector.events[0] if isinstance(each, Started)]
    traces = _traces(collector)
    assert traces[0].wait_s == 0.0
    assert all(trace.verify_s > 0.0 and trace.wait_s >= 0.0 for trace in traces)
    # From leaving the queue to the last verdict; an idle step reads the clock three times.
    assert sum(trace.wait_s + trace.verify_s for trace in traces) == clock.now_s - 3.0 - begin_s


def test_rows_are_committed_tokens_and_nodes(decoder: Decoder) -> None:
    engine, _ = _with_oracle(decoder)
    first, *others = _traces(run(engine, [_traced()]))
    assert first.num_rows == len(PROMPT) + len(first.tree)
    assert all(trace.num_rows == 1 + len(trace.tree) for trace in others)


def test_answer_names_the_draft_and_its_time(decoder: Decoder) -> None:
    engine, _ = _with_oracle(decoder)
    traces = _traces(run(engine, [_traced()]))
    drafts = [trace.draft for trace in traces]
    assert {draft.algorithm for draft in drafts if draft is not None} == {"SCRIPTED"}
    # The first tree waits for the prompt, so it is no answer to a verdict.
    assert drafts[0] == DraftAnswer("SCRIPTED", None)
    timed = [draft.response_s for draft in drafts[2:] if draft is not None]
    assert timed
    assert all(seconds is not None and seconds > 0.0 for seconds in timed)


def test_without_a_draft_rounds_are_plain(decoder: Decoder) -> None:
    traces = _traces(run(build_engine(decoder), [_traced()]))
    assert {trace.tree for trace in traces} == {EMPTY_TREE}
    assert {trace.draft for trace in traces} == {None}


def test_nodes_beyond_the_end_are_not_told(decoder: Decoder) -> None:
    engine, _ = _with_oracle(decoder, quality=1.0)
    collector = run(engine, [_traced(stop=StopParams(3))])
    for trace, delta in zip(_traces(collector), _deltas(collector), strict=True):
        assert len(trace.accepted_nodes) <= len(delta.token_ids)
    assert max(_traces(collector)[-1].tree.depths, default=0) <= 3


def test_nobody_asks_nothing_is_told_and_tokens_are_the_same(decoder: Decoder) -> None:
    engine, _ = _with_oracle(decoder)
    collector = run(engine, [request(PROMPT)])
    assert {delta.trace for delta in _deltas(collector)} == {None}
    assert not any(response_message(event).delta.HasField("trace") for event in _deltas(collector))
    other, _ = _with_oracle(decoder)
    assert run(other, [_traced()]).token_ids(0) == collector.token_ids(0)


def test_trace_on_the_wire_is_the_trace(decoder: Decoder) -> None:
    engine, _ = _with_oracle(decoder)
    for delta in _deltas(run(engine, [_traced()])):
        message, trace = response_message(delta).delta.trace, delta.trace
        assert trace is not None
        sent = tree_from_message(message.tree)
        assert (sent.token_ids, sent.parent_indices) == (
            trace.tree.token_ids,
            trace.tree.parent_indices,
        )
        assert tuple(message.accepted_node_indices) == trace.accepted_nodes
        assert (message.round, message.row_count) == (trace.round, trace.num_rows)
        assert message.verify_duration.ToNanoseconds() / 1e9 == trace.verify_s
        assert message.wait_duration.ToNanoseconds() / 1e9 == trace.wait_s
        assert trace.draft is not None
        assert message.algorithm == trace.draft.algorithm
        assert message.HasField("draft_duration") == (trace.draft.response_s is not None)


def _no_tree(_tokens: list[int]) -> TokenTree:
    return EMPTY_TREE


def test_only_drafts_of_the_algorithm_asked_for_get_the_sequence(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    drafts = [
        ScriptedDraft(engine, _no_tree, name=name, algorithm=algorithm)
        for name, algorithm in (("a", "NGRAM"), ("b", "EAGLE3"), ("c", "NGRAM"))
    ]
    for draft in drafts:
        draft.attach()
    collector = Collector()
    for key in range(4):
        engine.submit(replace(request(PROMPT), draft_algorithm="EAGLE3"), collector, key)
    engine.step()
    assert engine.draft_algorithms == ("EAGLE3", "NGRAM")
    assert [len(each.committed) for each in drafts] == [0, 4, 0]


def test_algorithm_whose_draft_left_decodes_plainly(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    draft = ScriptedDraft(engine, oracle_trees([_answer(decoder)], 5, 1.0), algorithm="NGRAM")
    draft.attach()
    engine.step()
    draft.detach()
    collector = run(engine, [_traced(draft_algorithm="NGRAM")])
    assert engine.draft_algorithms == ()
    assert {trace.draft for trace in _traces(collector)} == {None}
    assert PROMPT + collector.token_ids(0) == _answer(decoder)


def test_algorithm_nobody_ever_had_is_refused_by_name(decoder: Decoder) -> None:
    engine = build_engine(decoder)
    ScriptedDraft(engine, _no_tree, algorithm="NGRAM").attach()
    collector = run(engine, [_traced(draft_algorithm="EAGEL")])
    error = collector.failure(0).error
    assert isinstance(error, InvalidArgument)
    assert error.message == "no draft of algorithm 'EAGEL' ever attached; there was NGRAM"
    assert error.violations[0].field == "speculation.algorithm"
    assert not any(isinstance(event, Started) for event in collector.events[0])
