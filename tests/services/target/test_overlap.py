"""The loop runs a step ahead of what it has read, and nobody can tell from the tokens."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from services.target.drafts.attachment import DraftMessage
from services.target.engine import Engine
from services.target.requests.request import Event, Finished, GenerationRequest
from services.target.step_report import HostGap, StepReport
from services.target.verifier import VerificationMode
from shared.generation import Delta, Failed
from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.runner import ModelRunner, RunnerOutput
from shared.tokens import FinishReason, SamplingParams, StopParams
from tests.helpers.engines import (
    PAGE_SIZE,
    VOCAB_SIZE,
    Collector,
    ScriptedDraft,
    build_engine,
    random_trees,
    request,
    run,
    settle,
    tiny_decoder,
)
from tests.helpers.grammars import regex

PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [11], [3] * 12, [5, 6], [7, 7, 7])
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(seed=7),
    "truncated": SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, seed=1),
    "penalised": SamplingParams(frequency_penalty=0.7, repetition_penalty=1.3, seed=2),
    "biased": SamplingParams(logit_bias={3: 2.0, 5: -100.0}, seed=3),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


def _requests(sampling: SamplingParams) -> list[GenerationRequest]:
    """Returns requests of unequal lengths, so that sequences leave at different steps."""
    return [
        request(prompt, replace(sampling, seed=sampling.seed + i), StopParams(6 + 5 * i))
        for i, prompt in enumerate(PROMPTS)
    ]


def _events(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[Event]]:
    """Returns all events, with a request joining every third step."""
    collector = Collector()
    waiting = list(enumerate(requests))
    for step in range(10_000):
        if waiting and step % 3 == 0:
            key, each = waiting.pop(0)
            engine.submit(each, collector, key)
        if not engine.step() and not waiting:
            break
    settle(engine)
    return [collector.events[key] for key in range(len(requests))]


def _answers(events: Sequence[Sequence[Event]]) -> list[list[Event]]:
    """Returns deltas and ends; how long a request was queued depends on the steps before."""
    return [list(own[1:]) for own in events]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_those_of_a_loop_that_reads_each_step_first(decoder: Decoder, name: str) -> None:
    requests = [replace(each, top_logprobs=2) for each in _requests(SAMPLINGS[name])]
    expected = _answers(_events(build_engine(decoder, overlaps=False), requests))
    for max_step_rows in (64, 3):
        engine = build_engine(decoder, max_step_rows=max_step_rows, poisons_free_pages=True)
        assert _answers(_events(engine, requests)) == expected


def test_requests_of_every_kind_share_steps(decoder: Decoder) -> None:
    requests = [
        request(prompt, replace(sampling, seed=i), StopParams(8 + 3 * i))
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS.values(), strict=False))
    ]
    expected = _answers(_events(build_engine(decoder, overlaps=False), requests))
    assert _answers(_events(build_engine(decoder), requests)) == expected


def test_tokens_come_one_step_after_their_launch(decoder: Decoder) -> None:
    engine, collector = build_engine(decoder), Collector()
    engine.submit(request([1, 2, 3]), collector, 0)
    seen = []
    for _ in range(4):
        engine.step()
        seen.append(len(collector.token_ids(0)))
    assert seen == [0, 1, 2, 3]


def test_step_with_a_grammar_is_read_before_the_next(decoder: Decoder) -> None:
    engine, collector = build_engine(decoder), Collector()
    engine.submit(request([1, 2, 3], grammar=regex("[ab]+")), collector, 0)
    engine.step()
    assert len(collector.token_ids(0)) == 1


def test_step_of_the_point_mass_rule_is_read_before_the_next(decoder: Decoder) -> None:
    engine, collector = build_engine(decoder, mode=VerificationMode.POINT_MASS), Collector()
    engine.submit(request([1, 2, 3]), collector, 0)
    engine.step()
    assert len(collector.token_ids(0)) == 1


def test_penalties_count_the_token_in_flight(decoder: Decoder) -> None:
    sampling = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
    engine = build_engine(decoder)
    engine.submit(request([1, 2, 3], sampling), collector := Collector(), 0)
    engine.step()
    engine.step()
    assert len(collector.token_ids(0)) == 1
    settle(engine)
    expected = run(build_engine(decoder, overlaps=False), [request([1, 2, 3], sampling)])
    assert collector.token_ids(0) == expected.token_ids(0)
    plain = run(build_engine(decoder), [request([1, 2, 3])]).token_ids(0)
    assert collector.token_ids(0) != plain


def test_sequence_with_a_draft_is_read_before_the_next_step(decoder: Decoder) -> None:
    engine, collector = build_engine(decoder), Collector()
    ScriptedDraft(engine, random_trees(0)).attach()
    engine.submit(request([1, 2, 3]), collector, 0)
    engine.step()
    assert len(collector.token_ids(0)) >= 1


def test_draft_that_attaches_finds_nothing_in_flight(decoder: Decoder) -> None:
    engine, collector = build_engine(decoder), Collector()
    engine.submit(request([1, 2, 3]), collector, 0)
    expected = run(build_engine(decoder, overlaps=False), [request([1, 2, 3])]).token_ids(0)
    engine.step()
    draft = ScriptedDraft(engine, random_trees(1))
    draft.attach()
    engine.step()
    assert draft.committed == {1: [1, 2, 3, *collector.token_ids(0)]}
    settle(engine)
    assert collector.token_ids(0) == expected


def _stopped(decoder: Decoder, num_output: int) -> GenerationRequest:
    """Returns a request that a stop token ends after `num_output` tokens."""
    plain = run(build_engine(decoder), [request([1, 2, 3, 4, 5])]).token_ids(0)
    token = plain[num_output - 1]
    assert token not in plain[: num_output - 1]
    stop = StopParams(24, stop_token_ids=frozenset({token}))
    return request([1, 2, 3, 4, 5], stop=stop)


def test_end_is_noticed_a_step_late_and_the_row_thrown_away(decoder: Decoder) -> None:
    reports: list[StepReport] = []
    engine = build_engine(decoder, on_step=reports.append, prefix_cache=False)
    collector = Collector()
    engine.submit(_stopped(decoder, 3), collector, 0)
    while 0 not in collector.events or not isinstance(collector.events[0][-1], Finished):
        engine.step()
    assert len(collector.token_ids(0)) == 3
    assert engine.gauges_now().num_running == 0
    assert engine.gauges_now().num_held_pages == 2
    settle(engine)
    assert len(collector.token_ids(0)) == 3
    assert [report.num_discarded for report in reports] == [0, 0, 0, 1]
    assert sum(report.num_committed for report in reports) == 3


def test_thrown_away_row_is_not_published(decoder: Decoder) -> None:
    """Prompt and output fill two pages exactly; the last token's KV is computed for nothing."""
    cached = []
    for overlaps in (True, False):
        engine = build_engine(decoder, overlaps=overlaps)
        run(engine, [_stopped(decoder, 2 * PAGE_SIZE - 5)])
        cached.append(engine.gauges_now().num_cached_pages)
    assert cached == [1, 1]


def test_prompt_alone_is_published_while_a_row_is_in_flight(decoder: Decoder) -> None:
    engine, collector = build_engine(decoder), Collector()
    engine.submit(request([1, 2, 3, 4, 5, 6, 7]), collector, 0)
    engine.step()
    engine.step()
    # Prompt and first token would be two pages.
    assert engine.gauges_now().num_cached_pages == 1


def test_output_limit_is_known_ahead(decoder: Decoder) -> None:
    reports: list[StepReport] = []
    engine = build_engine(decoder, on_step=reports.append)
    collector = run(engine, [request([1, 2, 3], stop=StopParams(5))])
    assert len(collector.token_ids(0)) == 5
    assert collector.finished(0).reason is FinishReason.LENGTH
    assert [report.num_rows for report in reports] == [3, 1, 1, 1, 1]
    assert sum(report.num_discarded for report in reports) == 0


def test_cancel_of_a_sequence_in_flight(decoder: Decoder) -> None:
    engine, collector = build_engine(decoder, prefix_cache=False), Collector()
    keys = (0, 1)
    for key in keys:
        engine.submit(request([1, 2, 3 + key], stop=StopParams(12)), collector, key)
    for _ in range(3):
        engine.step()
    engine.cancel(collector, 0)
    num_events = len(collector.events[0])
    held = engine.gauges_now().num_held_pages
    engine.step()
    assert engine.gauges_now().num_held_pages < held
    settle(engine)
    assert len(collector.events[0]) == num_events
    expected = run(build_engine(decoder, overlaps=False), [request([1, 2, 4])]).token_ids(0)
    assert collector.token_ids(1) == expected[:12]


def test_cancel_of_a_prompt_in_flight(decoder: Decoder) -> None:
    engine, collector = build_engine(decoder, max_step_rows=4), Collector()
    engine.submit(request([3] * 12), collector, 0)
    engine.step()
    engine.cancel(collector, 0)
    settle(engine)
    assert engine.gauges_now().num_running == 0


def test_preempted_sequence_keeps_the_token_in_flight(decoder: Decoder) -> None:
    requests = [request([i, 1, 2], SamplingParams(seed=i), StopParams(20)) for i in range(4)]
    expected = run(build_engine(decoder, overlaps=False), requests)
    for prefix_cache in (True, False):
        reports: list[StepReport] = []
        engine = build_engine(
            decoder,
            num_pages=13,
            on_step=reports.append,
            prefix_cache=prefix_cache,
            poisons_free_pages=True,
        )
        found = run(engine, requests)
        assert [found.token_ids(i) for i in range(4)] == [expected.token_ids(i) for i in range(4)]
        assert sum(report.num_preempted for report in reports) > 0


def test_random_cancels_lose_no_page_and_change_no_neighbour(decoder: Decoder) -> None:
    requests = [request([i, 2], SamplingParams(seed=i), StopParams(9)) for i in range(8)]
    expected = run(build_engine(decoder, overlaps=False), requests)
    engine, collector = build_engine(decoder, num_pages=18, poisons_free_pages=True), Collector()
    for key, each in enumerate(requests):
        engine.submit(each, collector, key)
    for step in range(200):
        if step in (2, 5, 6):
            engine.cancel(collector, step)
        engine.step()
    settle(engine)
    for key in (0, 1, 3, 4, 7):
        assert collector.token_ids(key) == expected.token_ids(key)


def _random_request(source: random.Random) -> GenerationRequest:
    sampling = source.choice(list(SAMPLINGS.values()))
    prompt = [source.randrange(VOCAB_SIZE) for _ in range(source.choice([1, 3, 4, 9, 17]))]
    num_output = source.randint(1, 20)
    stop = StopParams(
        num_output,
        min_output_tokens=source.randint(0, num_output),
        stop_token_ids=frozenset(source.sample(range(VOCAB_SIZE), 2)),
    )
    return request(prompt, replace(sampling, seed=source.randrange(1000)), stop)


@pytest.mark.parametrize("seed", range(3))
def test_random_lives_change_no_token(decoder: Decoder, seed: int) -> None:
    """Requests come and go, a draft does, pages run short and are poisoned when free."""
    source = random.Random(seed)
    requests = [_random_request(source) for _ in range(20)]
    expected = run(build_engine(decoder, overlaps=False, max_running=32), requests)
    reports: list[StepReport] = []
    engine = build_engine(
        decoder, num_pages=13, max_step_rows=source.choice([5, 64]),
        prefix_cache=source.random() < 0.5, on_step=reports.append, poisons_free_pages=True,
    )  # fmt: skip
    collector, cancelled = Collector(), set(source.sample(range(20), 4))
    draft = ScriptedDraft(engine, random_trees(seed))
    first, gone, again = sorted(source.sample(range(60), 3))
    actions = {first: draft.attach, gone: draft.detach, again: draft.attach}
    arrivals = sorted((source.randrange(60), key) for key in range(20))
    for step in range(2000):
        while arrivals and arrivals[0][0] <= step:
            key = arrivals.pop(0)[1]
            engine.submit(requests[key], collector, key)
            if key in cancelled:
                actions[step + source.randint(1, 6)] = partial(engine.cancel, collector, key)
        actions.pop(step, lambda: None)()
        if not engine.step() and not arrivals and not actions:
            break
    settle(engine)
    for key in set(range(20)) - cancelled:
        assert collector.token_ids(key) == expected.token_ids(key)
        assert collector.finished(key).reason is expected.finished(key).reason
    assert sum(report.num_preempted for report in reports) > 0


class _Waiting(Collector):
    """Tells when the request has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.has_ended = threading.Event()
        self.has_begun = threading.Event()

    def deliver(self, events: Sequence[tuple[int, Event]]) -> None:
        super().deliver(events)
        self.has_begun.set()
        if any(isinstance(event, Finished | Failed) for _, event in events):
            self.has_ended.set()


def test_thread_drains_what_is_in_flight(decoder: Decoder) -> None:
    engine, sink = build_engine(decoder), _Waiting()
    engine.start()
    engine.submit(_stopped(decoder, 3), sink, 0)
    assert sink.has_ended.wait(60)
    gauges = engine.gauges().result(60)
    engine.stop()
    assert len(sink.token_ids(0)) == 3
    assert gauges.num_running == 0
    settle(engine)


def test_stop_fails_what_is_in_flight(decoder: Decoder) -> None:
    engine, sink = build_engine(decoder, max_context_tokens=700), _Waiting()
    engine.start()
    engine.submit(request([1], stop=StopParams(600)), sink, 0)
    assert sink.has_begun.wait(60)
    engine.stop()
    assert sink.has_ended.is_set()


def test_host_gap_is_from_reading_the_last_step_to_the_next_launch() -> None:
    gap = HostGap()
    assert gap.launched(1.0) == 0.0
    gap.read(3.0)
    assert gap.launched(3.5) == 0.5
    assert gap.launched(4.0) == 0.0
    gap.read(5.0)
    gap.wait()
    assert gap.launched(9.0) == 0.0


@pytest.mark.parametrize(("overlaps", "has_gap"), [(True, False), (False, True)])
def test_loop_that_runs_ahead_has_no_gap(decoder: Decoder, overlaps: bool, has_gap: bool) -> None:
    reports: list[StepReport] = []
    engine = build_engine(decoder, on_step=reports.append, overlaps=overlaps)
    run(engine, [request([1, 2, 3], stop=StopParams(8))])
    assert (sum(report.host_gap_s for report in reports) > 0.0) is has_gap


class _AsideRunner(ModelRunner):
    """Notes its launches, as a device does that computes while the host goes on."""

    def __init__(self, decoder: Decoder, pool: KvPool, journal: list[str]) -> None:
        super().__init__(decoder, pool)
        self._journal = journal

    @property
    def computes_aside(self) -> bool:
        return True

    def run(self, batch: ForwardBatch, *, capture_layers: tuple[int, ...] = ()) -> RunnerOutput:
        self._journal.append("launch")
        return super().run(batch, capture_layers=capture_layers)


@dataclass(eq=False)
class _NotingCollector(Collector):
    journal: list[str] = field(default_factory=list)

    def deliver(self, events: Sequence[tuple[int, Event]]) -> None:
        super().deliver(events)
        self.journal += ["tokens"] if any(isinstance(each, Delta) for _, each in events) else []


@dataclass(eq=False)
class _NotingDraft(ScriptedDraft):
    journal: list[str] = field(default_factory=list)

    def send(self, message: DraftMessage) -> bool:
        self.journal += ["verdict"] if message.verdicts else []
        return super().send(message)


def test_tokens_go_out_while_the_device_computes_what_follows(decoder: Decoder) -> None:
    journal: list[str] = []
    collector = _NotingCollector(journal=journal)
    make_runner = partial(_AsideRunner, journal=journal)
    engine = build_engine(decoder, make_runner=make_runner)
    _NotingDraft(engine, random_trees(1), journal=journal).attach()
    engine.submit(request([1, 2, 3], GREEDY, StopParams(12)), collector, 0)
    settle(engine)
    launches = [i for i, each in enumerate(journal) if each == "launch"]
    assert len(launches) > 2
    for begin, end in itertools.pairwise(launches[1:]):
        assert journal[begin:end] == ["launch", "tokens", "verdict"]
    assert journal[-1] == "tokens"
    assert collector.finished(0).num_output_tokens == 12


def test_tokens_do_not_wait_for_a_draft(decoder: Decoder) -> None:
    journal: list[str] = []
    collector = _NotingCollector(journal=journal)
    engine = build_engine(decoder, make_runner=partial(_AsideRunner, journal=journal))
    _NotingDraft(
        engine, random_trees(1), disturb=lambda batch: [], wait_s=50.0, journal=journal
    ).attach()
    engine.submit(request([1, 2, 3], GREEDY, StopParams(12)), collector, 0)
    for _ in range(3):
        del journal[:]
        while "verdict" not in journal:
            engine.step()
        assert journal == ["launch", "verdict", "tokens"]
