"""The controller in a real engine whose time is a model's: it pays, or it costs next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from services.target.control import outlooks
from services.target.control.adaptive_config import AdaptiveConfig, Candidates
from services.target.control.probe_budget import PROBE_SHARE
from services.target.control.speculation_controller import SpeculationController
from services.target.drafts.attachment import DraftMessage
from services.target.requests.request import GenerationRequest
from shared.models.decoder import Decoder
from shared.tokens import DraftReport, SamplingParams, StopParams, TreeShape
from tests.helpers.engines import (
    ScriptedDraft,
    build_engine,
    random_trees,
    request,
    run,
    shuffled_drops,
    tiny_decoder,
)
from tests.helpers.model_time import ModelClock, TimedDraft, TimedRun, run_timed, timed_engine

POOL = {"num_pages": 1000, "max_context_tokens": 500}
NUM_TOKENS = 240
COLD_START_S = 0.4
"""What it may cost, once, to find out what a new kind of draft is worth on the slow device."""

StepTime = Callable[[int], float]


def _slow_step(rows: int) -> float:
    """A CPU: rows are not free."""
    return 0.012 + 0.0012 * rows


def _slow_draft(steps: int, size: int) -> float:
    return 0.001 + steps * (0.005 + 0.001 * size)


def _fast_step(rows: int) -> float:
    """A GPU: rows are nearly free."""
    return 0.005 + 0.00001 * rows


def _fast_draft(steps: int, size: int) -> float:
    return 0.0005 + steps * 0.0003


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("tiny"))


def _requests(count: int, num_tokens: int = NUM_TOKENS) -> list[GenerationRequest]:
    stop = StopParams(num_tokens, ignore_eos=True)
    return [
        request([1 + key, 2, 3], SamplingParams(temperature=0.8, seed=key), stop)
        for key in range(count)
    ]


@dataclass(frozen=True)
class _Bench:
    """The same requests, plain and drafted for, by the clock of a cost model."""

    decoder: Decoder
    requests: Sequence[GenerationRequest]
    answers: Sequence[Sequence[int]]

    @classmethod
    def of(cls, decoder: Decoder, requests: Sequence[GenerationRequest]) -> _Bench:
        plain = run(build_engine(decoder, **POOL), requests)  # type: ignore[arg-type]
        answers = [
            [*each.prompt_token_ids, *plain.token_ids(key)] for key, each in enumerate(requests)
        ]
        return cls(decoder, requests, answers)

    def plain_s(self, step_s: StepTime) -> float:
        clock = ModelClock()
        engine = timed_engine(self.decoder, clock, step_s, None, **POOL)
        return run_timed(engine, clock, self.requests).duration_s

    def drafted(
        self,
        controller: SpeculationController,
        step_s: StepTime,
        draft_s: Callable[[int, int], float],
        right: Callable[[list[int]], float],
    ) -> tuple[TimedRun, TimedDraft]:
        """Runs with a draft that gets each level right that often; checks the output."""
        clock = ModelClock()
        engine = timed_engine(self.decoder, clock, step_s, controller, **POOL)
        draft = TimedDraft(engine, clock, self.answers, right, draft_s)
        draft.attach()
        result = run_timed(engine, clock, self.requests)
        for key, answer in enumerate(self.answers):
            prompt = self.requests[key].prompt_token_ids
            assert [*prompt, *result.collector.token_ids(key)] == answer
        return result, draft


@pytest.fixture(scope="module")
def one(decoder: Decoder) -> _Bench:
    return _Bench.of(decoder, _requests(1))


@pytest.fixture(scope="module")
def four(decoder: Decoder) -> _Bench:
    return _Bench.of(decoder, _requests(4))


@pytest.mark.parametrize("right", [0.0, 0.4, 0.7])
@pytest.mark.parametrize("bench_name", ["one", "four"])
def test_where_speculation_loses_it_costs_no_more_than_the_probes(
    bench_name: str, right: float, request: pytest.FixtureRequest
) -> None:
    bench: _Bench = request.getfixturevalue(bench_name)
    plain_s = bench.plain_s(_slow_step)
    fixed, _ = bench.drafted(
        SpeculationController(None), _slow_step, _slow_draft, lambda tokens: right
    )
    adaptive, _ = bench.drafted(
        SpeculationController(), _slow_step, _slow_draft, lambda tokens: right
    )
    assert fixed.duration_s > plain_s, "a case in which speculation does not lose"
    assert adaptive.duration_s < (1 + 2 * PROBE_SHARE) * plain_s + COLD_START_S


@pytest.mark.parametrize(("right", "gain"), [(0.4, 1.1), (0.7, 1.6), (0.95, 2.5)])
def test_where_speculation_pays_it_is_used_and_deeper_where_that_pays(
    one: _Bench, right: float, gain: float
) -> None:
    adaptive, draft = one.drafted(
        SpeculationController(), _fast_step, _fast_draft, lambda tokens: right
    )
    assert one.plain_s(_fast_step) > gain * adaptive.duration_s
    if right == 0.95:
        assert max(shape.num_steps for shape in draft.shapes[-10:]) > 3


def test_a_useless_draft_is_left_alone_but_for_probes(one: _Bench) -> None:
    controller = SpeculationController()
    _, draft = one.drafted(controller, _slow_step, _slow_draft, lambda tokens: 0.0)
    assert draft.num_batches < 25
    counts = controller.take_counts()
    assert counts.num_paused_rounds == 0, "taken with each step's report"
    assert controller.budget.spent_s > 0


def test_a_change_of_text_is_noticed_both_ways(decoder: Decoder) -> None:
    bench = _Bench.of(decoder, _requests(1, 400))

    def right(tokens: list[int]) -> float:
        return 0.95 if 130 <= len(tokens) < 270 else 0.0

    _, draft = bench.drafted(SpeculationController(), _fast_step, _fast_draft, right)
    asked_at = [num_tokens for num_tokens, _ in draft.asked]
    inside = sum(150 <= at < 270 for at in asked_at)
    after = sum(at >= 300 for at in asked_at)
    # 100 tokens after the first change it must have been found, whole trees at a time.
    deep = [shape for at, shape in draft.asked if 230 <= at < 270]
    assert deep
    assert inside > 3, "more than a probe"
    # Then 100 plain tokens with a probe now and then.
    assert after < 40


def test_sequences_that_fell_out_of_step_are_gathered(four: _Bench) -> None:
    _, draft = four.drafted(SpeculationController(), _fast_step, _fast_draft, lambda tokens: 0.7)
    sizes = draft.sizes[len(draft.sizes) // 2 : -8]
    assert sum(sizes) / len(sizes) > 3.0


def test_a_pinned_shape_is_neither_changed_cut_nor_paused(one: _Bench) -> None:
    clock = ModelClock()
    engine = timed_engine(one.decoder, clock, _slow_step, SpeculationController(), **POOL)
    draft = TimedDraft(engine, clock, one.answers, lambda tokens: 0.0, _slow_draft)
    draft.attach()
    pin = DraftReport(pinned_shape=draft.shape)
    engine.offer(draft.name, (), pin)
    draft.report = pin
    run_timed(engine, clock, one.requests)
    assert draft.num_batches > 0.9 * NUM_TOKENS
    assert set(draft.shapes) == {TreeShape(3, 1, 4)}


def test_a_request_may_set_the_depth(one: _Bench) -> None:
    bench = replace(one, requests=[replace(each, num_draft_steps=2) for each in one.requests])
    _, draft = bench.drafted(SpeculationController(), _slow_step, _slow_draft, lambda tokens: 0.0)
    assert draft.num_batches > 0.9 * NUM_TOKENS
    assert {shape.num_steps for shape in draft.shapes} == {2}


def test_a_config_without_0_never_pauses(one: _Bench) -> None:
    config = AdaptiveConfig({1: Candidates(steps=(1, 2), may_pause=False)})
    _, draft = one.drafted(
        SpeculationController(config), _slow_step, _slow_draft, lambda tokens: 0.0
    )
    assert draft.num_batches > 0.9 * NUM_TOKENS
    assert draft.shapes[-1].num_steps == 1


def test_only_the_good_sequence_of_a_batch_is_drafted_for_in_the_end(four: _Bench) -> None:
    def right(tokens: list[int]) -> float:
        return 0.98 if tokens[0] == 1 else 0.0

    def cheap_draft(steps: int, size: int) -> float:
        return 0.0001 * steps

    result, _ = four.drafted(SpeculationController(), _slow_step, cheap_draft, right)
    good, *others = (result.collector.finished(key).stats for key in range(4))
    assert good.num_rounds < NUM_TOKENS / 2
    assert all(stats.num_verified_rounds < NUM_TOKENS / 4 for stats in others)


@dataclass
class _NotingDraft(ScriptedDraft):
    """Notes which sequences it was given."""

    opened: set[int] = field(default_factory=set)

    def send(self, message: DraftMessage) -> bool:
        self.opened |= {each.sequence_id for each in message.opened}
        return super().send(message)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("algorithms", [("SAME", "SAME"), ("ONE", "OTHER")])
def test_output_is_the_same_while_the_controller_switches_all_the_time(
    decoder: Decoder,
    temperature: float,
    algorithms: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outlooks, "MIN_STAY", 2)
    monkeypatch.setattr(outlooks, "MOVE_GAIN", 0.5)
    sampling = SamplingParams(temperature=temperature, seed=7, repetition_penalty=1.2)
    requests = [request([1 + key, 2], sampling, StopParams(60)) for key in range(5)]
    plain = run(build_engine(decoder), requests)
    restless = Candidates(smoothing=1.0, update_interval=1)
    controller = SpeculationController(AdaptiveConfig({1: restless}))
    controller.budget.share = 0.5
    engine = build_engine(decoder, speculation=controller)
    drafts = [
        _NotingDraft(
            engine,
            random_trees(seed),
            name=f"draft-{seed}",
            disturb=shuffled_drops(seed),
            algorithm=algorithm,
        )
        for seed, algorithm in enumerate(algorithms)
    ]
    for draft in drafts:
        draft.attach()
    drafted = run(engine, requests)
    for key in range(len(requests)):
        assert drafted.token_ids(key) == plain.token_ids(key)
    if algorithms[0] != algorithms[1]:
        assert drafts[0].opened & drafts[1].opened, "no sequence moved"


def _timed(
    bench: _Bench, draft_s: Callable[[int, int], float], drafts: Sequence[dict[str, object]]
) -> tuple[TimedRun, list[TimedDraft]]:
    clock = ModelClock()
    engine = timed_engine(bench.decoder, clock, _fast_step, SpeculationController(), **POOL)
    attached = [
        TimedDraft(engine, clock, bench.answers, draft_s=draft_s, **each)  # type: ignore[arg-type]
        for each in drafts
    ]
    for draft in attached:
        draft.attach()
    result = run_timed(engine, clock, bench.requests)
    for key, answer in enumerate(bench.answers):
        prompt = bench.requests[key].prompt_token_ids
        assert [*prompt, *result.collector.token_ids(key)] == answer
    return result, attached


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_sequence_ends_up_with_the_kind_of_draft_that_suits_it(
    one: _Bench, order: tuple[int, int]
) -> None:
    kinds: list[dict[str, object]] = [
        {"name": "a", "algorithm": "NGRAM", "right": lambda tokens: 0.1},
        {"name": "b", "algorithm": "STANDALONE", "right": lambda tokens: 0.95},
    ]
    _, drafts = _timed(one, _fast_draft, [kinds[index] for index in order])
    by_name = {draft.name: draft for draft in drafts}
    # Of the good one fewer batches are needed, because its trees are deep.
    assert by_name["b"].num_batches > NUM_TOKENS / 10
    assert by_name["b"].asked[-1][0] > NUM_TOKENS - 20, "it is the one that drafts in the end"


def test_both_kinds_are_tried_and_each_sequence_keeps_its_own(four: _Bench) -> None:
    kinds: list[dict[str, object]] = [
        {
            "name": "a",
            "algorithm": "NGRAM",
            "right": lambda tokens: 0.95 if tokens[0] <= 2 else 0.0,
        },
        {
            "name": "b",
            "algorithm": "STANDALONE",
            "right": lambda tokens: 0.95 if tokens[0] > 2 else 0.0,
        },
    ]
    result, drafts = _timed(four, _fast_draft, kinds)
    assert all(draft.num_batches > 10 for draft in drafts)
    stats = [result.collector.finished(key).stats for key in range(4)]
    accepted = [each.num_accepted / max(each.num_verified_rounds, 1) for each in stats]
    assert sum(accepted) / 4 > 1.0


def test_drafts_of_one_kind_share_the_sequences(four: _Bench) -> None:
    pool: list[dict[str, object]] = [
        {"name": name, "right": lambda tokens: 0.8, "max_sequences": 3} for name in ("a", "b")
    ]
    _, drafts = _timed(four, _fast_draft, pool)
    held = [len(set(draft.sequence_ids)) for draft in drafts]
    assert held == [2, 2]


def test_where_no_depth_may_be_chosen_nothing_is_drafted(four: _Bench) -> None:
    controller = SpeculationController(AdaptiveConfig({1: Candidates(steps=())}))
    result, draft = four.drafted(controller, _fast_step, _fast_draft, lambda tokens: 0.9)
    assert draft.num_batches == 0
    assert result.duration_s == pytest.approx(four.plain_s(_fast_step))


def test_batches_without_a_depth_come_and_go(decoder: Decoder) -> None:
    lengths = (60, 150, 40, 90)
    requests = [
        replace(each, stop=StopParams(length, ignore_eos=True))
        for each, length in zip(_requests(4), lengths, strict=True)
    ]
    config = AdaptiveConfig(
        {1: Candidates(steps=(2, 3), may_pause=False), 2: Candidates(steps=()), 4: Candidates()}
    )
    controller, bench = SpeculationController(config), _Bench.of(decoder, requests)
    result, draft = bench.drafted(controller, _fast_step, _fast_draft, lambda tokens: 0.9)
    assert draft.num_batches > 0, "for the last one that is left"
    assert result.duration_s < bench.plain_s(_fast_step)
