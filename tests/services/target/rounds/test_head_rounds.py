"""Rounds on the device change no token, whoever comes, goes or asks for more than they can do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from llguidance import LLParserLimits

from services.target.adaptive_config import DEFAULT_CONFIG
from services.target.drafts.attachment import Attachment
from services.target.engine import Engine
from services.target.grammars.matcher import MaskedTree, MaskExecutor, Masks
from services.target.requests.request import GenerationRequest
from services.target.rounds.policy import LanePolicy, ShapeOrPlain
from services.target.rounds.round_factory import RoundFactory
from services.target.step_report import StepReport
from shared.grammar import GrammarKind
from shared.runtime.host_copy import DeviceMark, HostCopy
from shared.runtime.round_head import CatchUp, HeadBacklog, OwnHead
from shared.runtime.round_runner import RoundRunner
from shared.runtime.runner import ModelRunner
from shared.tokens import SamplingParams, StopParams, TreeShape
from tests.helpers.device_rounds import Pair, record_num_computed
from tests.helpers.engines import (
    VOCAB_SIZE,
    Collector,
    build_engine,
    request,
    run,
    run_plain,
    settle,
)
from tests.helpers.grammars import compiled, regex
from tests.helpers.masked_requests import masked_requests
from tests.helpers.shared_head_rounds import SilentDraft, any_choice, sharing_head

CPU = torch.device("cpu")
TREE = TreeShape(3, 3, 9)
OTHER_TREES = {TreeShape(4, 1, 5): 8, TreeShape(1, 5, 6): 3}
CONTEXT = 120
PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [11, 3], [3] * 21)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(seed=7),
    "truncated": SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, seed=1),
}
PENALISED = SamplingParams(frequency_penalty=0.7, repetition_penalty=1.3, seed=2)


@dataclass
class Setup:
    """An engine with a head that is lent to it, and what its steps reported."""

    engine: Engine
    draft: SilentDraft
    attachment: Attachment
    reports: list[StepReport]

    @property
    def num_drafted(self) -> int:
        return sum(report.num_drafted for report in self.reports)


def _compute_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose work is not done when the host comes to read it."""
    monkeypatch.setattr(ModelRunner, "computes_aside", True)
    monkeypatch.setattr(HostCopy, "is_done", False)
    monkeypatch.setattr(DeviceMark, "is_passed", False)


def _launches(
    monkeypatch: pytest.MonkeyPatch, number_of: Callable[[RoundRunner], int]
) -> list[int]:
    """Returns a list that takes a number of the runner behind each launch of a round."""
    numbers: list[int] = []
    launch = RoundRunner.launch

    def launch_noted(runner: RoundRunner, masked: Iterable[int]) -> None:
        launch(runner, masked)
        numbers.append(number_of(runner))

    monkeypatch.setattr(RoundRunner, "launch", launch_noted)
    return numbers


def _setup(
    pair: Pair,
    *,
    num_pages: int = 200,
    num_head_pages: int = 150,
    is_poisoned: bool = False,
    other_trees: Mapping[TreeShape, int] | None = None,
    max_sequences: int = 8,
    most_in_rounds: int | None = None,
    clock: Callable[[], float] | None = None,
) -> Setup:
    """`other_trees` has the policy choose; rounds take all sequences unless told otherwise."""
    reports: list[StepReport] = []
    engine = build_engine(
        pair.decoder,
        num_pages=num_pages,
        max_running=max_sequences,
        on_step=reports.append,
        poisons_free_pages=is_poisoned,
        adaptive=None if other_trees is None else DEFAULT_CONFIG,
        clock=clock,
    )
    draft = SilentDraft()
    attachment = sharing_head(
        pair,
        draft,
        TREE,
        other_trees or {},
        num_pages=num_head_pages,
        max_context_tokens=CONTEXT,
        max_sequences=most_in_rounds or max_sequences,
        is_pinned=other_trees is None,
    )
    engine.attach(attachment)
    return Setup(engine, draft, attachment, reports)


def _requests(
    sampling: SamplingParams, stop: StopParams | None = None, *, disabled: bool = False
) -> list[GenerationRequest]:
    return [request(prompt, sampling, stop, speculation_disabled=disabled) for prompt in PROMPTS]


def _tokens(collector: Collector, count: int) -> list[list[int]]:
    return [collector.token_ids(key) for key in range(count)]


def _plain(pair: Pair, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    return _tokens(run_plain(pair.decoder, requests), len(requests))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_output_is_that_of_plain_decoding(pair: Pair, sampling: str) -> None:
    requests = _requests(SAMPLINGS[sampling])
    setup = _setup(pair)
    collector = run(setup.engine, requests)
    assert _tokens(collector, len(requests)) == _plain(pair, requests)
    assert setup.num_drafted > 0
    assert setup.draft.opened == 0
    assert setup.attachment.counters.num_verified_rounds > 0
    stats = [collector.finished(key).stats for key in range(len(requests))]
    assert sum(each.num_drafted for each in stats) <= setup.num_drafted
    assert all(each.num_verified_rounds > 0 for each in stats)


def test_first_token_waits_for_no_round(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for the launch of one, where a device computes aside of the host."""
    launch, launched = RoundRunner.launch, list[int]()

    def noted(runner: RoundRunner, masked: Iterable[int] = ()) -> None:
        launched.append(runner.num_placed)
        launch(runner, masked)

    setup, collector = _setup(pair), Collector()
    monkeypatch.setattr(ModelRunner, "computes_aside", True)
    monkeypatch.setattr(RoundRunner, "launch", noted)
    setup.engine.submit(request(PROMPTS[0], SAMPLINGS["greedy"]), collector, 0)
    while not (0 in collector.events and collector.token_ids(0)):
        setup.engine.step()
    assert len(collector.token_ids(0)) == 1
    assert not launched
    settle(setup.engine)
    assert launched


@pytest.mark.parametrize("sampling", [*SAMPLINGS, "penalised"])
def test_round_reads_what_is_left_of_a_cached_prompt(pair: Pair, sampling: str) -> None:
    """No step is planned for it but where penalties would count it as output."""
    params = SAMPLINGS.get(sampling, PENALISED)
    setup = _setup(pair, is_poisoned=True)
    run(setup.engine, [request([3] * 21, params)])
    ends = [[5, 6, 7], [8], [9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1]]
    requests = [request([*[3] * 20, *end], params) for end in ends]
    setup.reports.clear()
    collector = run(setup.engine, requests)
    assert _tokens(collector, len(requests)) == _plain(pair, requests)
    reading = [report for report in setup.reports if report.num_prompt_rows]
    assert [report.round_shape is None for report in reading] == [sampling == "penalised"]
    assert reading[0].num_prompt_rows >= sum(map(len, ends)) - len(ends)
    assert setup.num_drafted > 0


@pytest.mark.parametrize("num_draft_tokens", [8, 9])
def test_trees_that_a_request_has_whole_are_left_to_rounds(
    pair: Pair, num_draft_tokens: int
) -> None:
    asked = _requests(SAMPLINGS["seeded"])
    requests = [replace(each, num_draft_tokens=num_draft_tokens) for each in asked]
    setup = _setup(pair)
    assert _tokens(run(setup.engine, requests), len(requests)) == _plain(pair, requests)
    is_whole = num_draft_tokens == TREE.num_draft_tokens
    assert (setup.num_drafted > 0) == is_whole
    assert (setup.draft.opened == 0) == is_whole


def test_stops_are_where_they_were(pair: Pair) -> None:
    plain = _plain(pair, _requests(SAMPLINGS["seeded"]))
    stop = StopParams(24, stop_token_ids=frozenset({plain[0][9], plain[1][4], plain[2][0]}))
    requests = _requests(SAMPLINGS["seeded"], stop)
    collector = run(_setup(pair).engine, requests)
    expected = run_plain(pair.decoder, requests)
    for key in range(len(requests)):
        assert collector.token_ids(key) == expected.token_ids(key)
        assert collector.finished(key).reason == expected.finished(key).reason
        assert collector.finished(key).stop_token_id == expected.finished(key).stop_token_id


BIASED = SamplingParams(seed=5, logit_bias={3: 2.0, 9: -100.0, 11: 1.5})


def test_lanes_shape_the_distributions_of_those_who_ask(pair: Pair) -> None:
    """Each on its own row, at every node of the trees, as plain steps do."""
    greedy = SamplingParams(temperature=0.0, frequency_penalty=1.1, presence_penalty=0.4)
    cut = replace(PENALISED, top_k=7, top_p=0.9, temperature=0.7)
    stop = StopParams(30, min_output_tokens=12, stop_token_ids=frozenset(range(0, VOCAB_SIZE, 2)))
    requests = [
        request([5, 4, 3], PENALISED, StopParams(30)),
        request([1, 2, 3, 4, 5], SAMPLINGS["seeded"], StopParams(30)),
        request([7] * 9, greedy, StopParams(30)),
        request([5, 4, 3], BIASED, StopParams(20), top_logprobs=3),
        request([8, 8], SAMPLINGS["truncated"], stop, top_logprobs=0),
        request([2, 9], cut, StopParams(25)),
        request([6, 1], replace(cut, allowed_token_ids=(3, 4, 8, 9, 11)), StopParams(25)),
        request([6, 2], SamplingParams(bad_words=((3,), (17,)), seed=1), StopParams(25)),
    ]
    setup, collector = _setup(pair), Collector()
    for key, each in enumerate(requests):
        setup.engine.submit(each, collector, key)
        for _ in range(3):
            setup.engine.step()
    settle(setup.engine)
    expected = run_plain(pair.decoder, requests)
    assert _tokens(collector, len(requests)) == _tokens(expected, len(requests))
    assert setup.draft.opened == 0
    for key in (3, 4):
        found, wanted = collector.logprobs(key), expected.logprobs(key)
        assert [each.rank for each in found] == [each.rank for each in wanted]
        assert [each.log_prob for each in found] == pytest.approx(
            [each.log_prob for each in wanted], abs=1e-4
        )
        assert [len(each.top) for each in found] == [len(each.top) for each in wanted]
    assert not collector.logprobs(0)


@pytest.mark.parametrize("most_masks", [1, 3, 99])
def test_lanes_follow_grammars_and_rules(
    pair: Pair, most_masks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a matcher stops in the middle of a tree, the path ends and the next round goes on."""
    fill = MaskExecutor.fill

    def first_masks(executor: MaskExecutor, trees: Sequence[MaskedTree], masks: Masks) -> None:
        fill(executor, trees, masks)
        for masked in trees:
            masks[masked.rows][most_masks:] = 0

    requests = masked_requests()
    expected = run_plain(pair.decoder, requests)
    monkeypatch.setattr(MaskExecutor, "fill", first_masks)
    setup, collector = _setup(pair, is_poisoned=True), Collector()
    for key, each in enumerate(requests):
        setup.engine.submit(each, collector, key)
        for _ in range(3):
            setup.engine.step()
    settle(setup.engine)
    assert _tokens(collector, len(requests)) == _tokens(expected, len(requests))
    assert setup.draft.opened == 0
    found, wanted = collector.logprobs(3), expected.logprobs(3)
    assert [each.rank for each in found] == [each.rank for each in wanted]
    planned = [report for report in setup.reports if report.round_shape is None]
    # The first tokens alone.
    assert sum(report.num_committed for report in planned) == len(requests)
    stats = [collector.finished(key).stats for key in range(4)]
    assert all(each.num_verified_rounds > 0 for each in stats)
    num_accepted = sum(each.num_accepted for each in stats)
    assert num_accepted > 4 if most_masks > 1 else num_accepted == 0


@pytest.mark.parametrize("is_masked", [False, True], ids=["unmasked", "masked"])
def test_plain_steps_are_timed_from_read_to_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, *, is_masked: bool
) -> None:
    """A step with masks is launched after the step before is read. If its time began there, plain
    steps would seem as fast with masks as without; and without any time, as the table says."""
    timed: list[float] = []

    def observe(
        policy: LanePolicy,
        choice: ShapeOrPlain,
        num_lanes: int,
        seconds: float,
        *,
        is_alone: bool = True,
    ) -> None:
        assert choice is None
        if is_alone:
            assert num_lanes == 2
            timed.append(seconds)

    monkeypatch.setattr(LanePolicy, "choose", lambda *_: None)
    monkeypatch.setattr(LanePolicy, "observe_time", observe)
    grammar = regex("[abc]*") if is_masked else None
    requests = [
        request([1, 2, 3 + key], stop=StopParams(12, ignore_eos=True), grammar=grammar)
        for key in range(2)
    ]
    setup = _setup(pair, other_trees=OTHER_TREES)
    run(setup.engine, requests)
    plain = [report for report in setup.reports if report.num_rows == 2]
    assert len(plain) == 11
    ends_s = [report.end_s for report in plain]
    assert len(timed) >= len(plain) - 1  # the first may come behind a prompt
    # The clock's reads between a step's read and its report are all that may differ.
    assert sum(timed[-10:]) == pytest.approx(ends_s[-1] - ends_s[0], abs=2.0)


@pytest.mark.parametrize(("num_each", "are_timed"), [(1, False), (3, True)])
def test_the_first_round_of_a_shape_is_not_timed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, num_each: int, *, are_timed: bool
) -> None:
    """It waits for what the draft does for the shape before."""
    shapes, numbers, timed = (TREE, *OTHER_TREES), itertools.count(), list[ShapeOrPlain]()
    monkeypatch.setattr(
        LanePolicy, "choose", lambda *_: shapes[next(numbers) // num_each % len(shapes)]
    )
    monkeypatch.setattr(
        LanePolicy, "observe_time", lambda _, choice, *__, **___: timed.append(choice)
    )
    setup = _setup(pair, other_trees=OTHER_TREES)
    run(setup.engine, [request([1, 2, 3], stop=StopParams(60, ignore_eos=True))])
    assert bool([choice for choice in timed if choice is not None]) is are_timed


def test_grammar_that_cannot_be_followed_ends_its_lane_alone(pair: Pair) -> None:
    limits = LLParserLimits(step_lexer_fuel=20, precompute_large_lexemes=False)
    hard = compiled(GrammarKind.REGEX, "(a|b|ab|abc){1,40}x(a|b|ab|abc){1,40}", limits)
    requests = [request([1, 2], SAMPLINGS["seeded"], grammar=hard), *masked_requests()]
    setup = _setup(pair)
    collector = run(setup.engine, requests)
    assert collector.failure(0).error.reason == "GRAMMAR_TOO_COMPLEX"
    expected = _plain(pair, requests[1:])
    assert [collector.token_ids(key) for key in range(1, len(requests))] == expected


@pytest.mark.parametrize(
    "other",
    [
        request([5, 4, 3], stop=StopParams(9), speculation_disabled=True),
        replace(request([5, 4, 3], stop=StopParams(9)), num_draft_steps=2),
        replace(request([5, 4, 3], stop=StopParams(9)), num_draft_tokens=2),
        replace(request([5, 4, 3], stop=StopParams(9)), wants_trace=True),
    ],
    ids=["disabled", "depth", "width", "trace"],
)
def test_a_request_that_no_lane_can_serve_steps_beside_the_lanes(
    pair: Pair, other: GenerationRequest
) -> None:
    """It comes while the others have lanes, and they keep them."""
    requests = [*_requests(SAMPLINGS["seeded"], StopParams(30)), other]
    setup = _setup(pair)
    collector = Collector()
    for key, each in enumerate(requests[:-1]):
        setup.engine.submit(each, collector, key)
    for _ in range(5):
        setup.engine.step()
    assert setup.num_drafted > 0
    setup.engine.submit(other, collector, len(requests) - 1)
    setup.reports.clear()
    while setup.engine.step() or setup.engine.gauges_now().num_running:
        pass
    setup.engine.check_idle()
    assert _tokens(collector, len(requests)) == _plain(pair, requests)
    assert setup.draft.opened == setup.draft.closed == 1 - other.speculation_disabled
    beside = [report for report in setup.reports if report.round_shape is None]
    assert sum(report.num_committed for report in beside) == 9


def test_a_sequence_that_outgrows_the_head_goes_on_in_the_general_path(pair: Pair) -> None:
    requests = [request([5, 4, 3] * 4, SAMPLINGS["seeded"], StopParams(CONTEXT))]
    setup = _setup(pair)
    collector = run(setup.engine, requests)
    assert _tokens(collector, 1) == _plain(pair, requests)
    assert setup.num_drafted > 0
    assert setup.draft.opened == 1
    assert setup.reports[-1].num_drafted == 0


def test_any_choice_up_to_the_longest_context_changes_no_token(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that a wide tree took at the end lie behind what a short chain can reach."""
    monkeypatch.setattr(LanePolicy, "choose", any_choice(3))
    requests = [request([5, 4, 3] * 4, SAMPLINGS["seeded"], StopParams(CONTEXT))]
    trees = {TreeShape(2, 16, 64): 8, TreeShape(1, 1, 2): 8}
    setup = _setup(pair, is_poisoned=True, other_trees=trees)
    collector = run(setup.engine, requests)
    assert _tokens(collector, 1) == _plain(pair, requests)
    assert {report.round_shape for report in setup.reports} == {None, TREE, *trees}


def test_prompts_that_come_later_join(pair: Pair) -> None:
    requests = _requests(SAMPLINGS["seeded"], StopParams(24))
    setup, collector = _setup(pair), Collector()
    for key, each in enumerate(requests):
        setup.engine.submit(each, collector, key)
        for _ in range(3):
            setup.engine.step()
    while setup.engine.step() or setup.engine.gauges_now().num_running:
        pass
    setup.engine.check_idle()
    assert _tokens(collector, len(requests)) == _plain(pair, requests)
    assert setup.draft.opened == 0


def test_places_of_those_that_have_ended_are_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eighteen sequences, of which only the last goes on for long."""
    sizes = record_num_computed(monkeypatch)
    lengths = [6] * 17 + [40]
    requests = [request([1 + key, 2], stop=StopParams(n)) for key, n in enumerate(lengths)]
    setup = _setup(pair, max_sequences=32)
    collector = run(setup.engine, requests)
    expected = run_plain(pair.decoder, requests)
    assert _tokens(collector, 18) == _tokens(expected, 18)
    assert max(sizes) == 24
    assert sizes[-1] == 1
    assert sizes.count(1) > 10


def test_time_between_two_results_is_that_of_a_round(pair: Pair) -> None:
    """The device computes the next one meanwhile, whatever the host does."""
    now_s = 0.0
    setup = _setup(pair, clock=lambda: now_s)
    launched_s: list[float] = []

    def each_step(step: int) -> None:
        nonlocal now_s
        if not launched_s and setup.engine.gauges_now().round_shape is not None:
            launched_s.append(now_s)
            setup.reports.clear()
        now_s += 1.0

    run(setup.engine, _requests(SAMPLINGS["greedy"], StopParams(40)), each_step=each_step)
    rounds = [report for report in setup.reports if report.round_shape is not None]
    assert len(rounds) > 5
    ends_s = [launched_s[0], *(report.end_s for report in rounds[:-1])]
    gaps_s = [
        report.end_s - report.duration_s - end_s
        for report, end_s in zip(rounds, ends_s, strict=True)
    ]
    # The last ones wait for the result that may end every sequence.
    assert gaps_s[1:5] == [0.0] * 4
    assert set(gaps_s) <= {0.0, 1.0}


def test_policy_forgets_what_it_observed_when_told(pair: Pair) -> None:
    """As after a warm-up, whose texts are no user's."""
    setup = _setup(pair, other_trees=OTHER_TREES)
    policies: list[LanePolicy] = []

    def each_step(step: int) -> None:
        policy = setup.engine._loop._rounds.policy
        if policy is not None:  # the draft is attached
            policies.append(policy)
        if step == 8:
            setup.engine.renew_policies()

    requests = _requests(SAMPLINGS["greedy"], StopParams(40))
    collector = run(setup.engine, requests, each_step=each_step)
    assert _tokens(collector, len(requests)) == _plain(pair, requests)
    first, last = policies[0], policies[-1]
    assert last is not first
    assert last.costs is first.costs


def test_device_waits_for_no_host_while_rounds_and_prompts_follow_each_other(pair: Pair) -> None:
    setup, collector = _setup(pair), Collector()
    setup.engine.submit(request(PROMPTS[0], stop=StopParams(40)), collector, 0)
    while not any(report.round_shape for report in setup.reports):
        setup.engine.step()
    setup.reports.clear()
    for key in (1, 2):
        setup.engine.submit(request(PROMPTS[key], stop=StopParams(40)), collector, key)
        while not (key in collector.events and collector.token_ids(key)):
            setup.engine.step()
    assert {report.round_shape is None for report in setup.reports} == {True, False}
    assert sum(report.host_gap_s for report in setup.reports) == 0.0
    settle(setup.engine)


class _TimedSteps:
    """An engine that steps at chosen times, as beside a device that computes. The first request
    runs, and its rounds take 10 ms.

    Attributes:
        launched: lanes of each launched round.
    """

    def __init__(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch, prompt: list[int], num_tokens: int
    ) -> None:
        _compute_aside(monkeypatch)
        self.launched = _launches(monkeypatch, lambda runner: runner.num_placed)
        self._now_s = 0.0
        setup, self.collector = _setup(pair, clock=lambda: self._now_s), Collector()
        self._engine, self._num_requests = setup.engine, 0
        self.submit(prompt, num_tokens)

    def submit(self, prompt: Iterable[int], num_tokens: int) -> None:
        asked = request([*prompt], stop=StopParams(num_tokens))
        self._engine.submit(asked, self.collector, self._num_requests)
        self._num_requests += 1

    def step(self, after_s: float = 0.010) -> bool:
        self._now_s += after_s
        return self._engine.step()

    def finish(self) -> None:
        while not all(map(self.collector.has_ended, range(self._num_requests))):
            self.step()
        settle(self._engine)


def test_a_round_is_launched_when_the_last_one_is_about_to_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the engine sleeps, and those who arrive take part in it together."""
    steps = _TimedSteps(pair, monkeypatch, PROMPTS[0], 60)
    while len(steps.launched) < 4:
        steps.step()
    for _ in range(3):
        before = len(steps.launched)
        assert not steps.step(0.0094)
        assert len(steps.launched) == before
        assert steps.step(0.0006)
        assert len(steps.launched) == before + 1
    for token in (5, 6):
        steps.submit([*PROMPTS[0], token], 5)
        assert not steps.step(0.001)
    assert steps.step(0.008)
    assert steps.launched[-1] == 3
    steps.finish()


def test_a_round_is_launched_earlier_if_its_head_has_to_hear_of_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnHead, "announce_s", 0.003)
    steps = _TimedSteps(pair, monkeypatch, PROMPTS[0], 60)
    while len(steps.launched) < 4:
        steps.step()
    before = len(steps.launched)
    assert not steps.step(0.0064)
    assert len(steps.launched) == before
    assert steps.step(0.0002)
    assert len(steps.launched) == before + 1
    steps.finish()


def test_a_round_waits_for_prompts_that_arrive_while_others_are_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the device has a planned step to compute; and for few rows."""
    steps = _TimedSteps(pair, monkeypatch, PROMPTS[0], 150)
    prompts = [range(first, 24) for first in (8, 7, 6, 5)]
    for key in (1, 2):  # the first shows how long such a step takes
        for _ in range(4):
            steps.step()
        steps.submit(prompts[key], 3)
    while not steps.collector.has_ended(2):
        steps.step()
    before = len(steps.launched)
    steps.submit(prompts[0], 3)
    assert steps.step(0.0096)
    assert not steps.step(0.001)
    steps.submit(prompts[3], 3)
    assert not steps.step(0.001)
    assert len(steps.launched) == before
    assert steps.step(0.008)
    assert len(steps.collector.token_ids(3)) == 1
    assert len(steps.launched) == before
    assert steps.step()
    assert len(steps.collector.token_ids(4)) == 1
    assert len(steps.launched) == before + 1
    steps.finish()


def test_no_round_is_launched_where_the_one_before_may_end_everybody(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be for nobody, and the next prompt would wait for it."""
    launched = _launches(monkeypatch, lambda runner: runner.num_pending)
    setup = _setup(pair)
    run(setup.engine, [request(PROMPTS[0], stop=StopParams(60))])
    assert 2 in launched
    assert launched[-1] == 1
    assert all(report.num_discarded == 0 for report in setup.reports)


def test_cancelled_sequences_leave_their_pages(pair: Pair) -> None:
    requests = _requests(SAMPLINGS["greedy"], StopParams(30))
    setup, collector = _setup(pair), Collector()
    for key, each in enumerate(requests):
        setup.engine.submit(each, collector, key)
    for _ in range(4):
        setup.engine.step()
    setup.engine.cancel(collector, 1)
    for _ in range(3):
        setup.engine.step()
    for key in (0, 2, 3):
        setup.engine.cancel(collector, key)
    setup.engine.step()
    assert not setup.engine.step()
    setup.engine.check_idle()
    plain = _plain(pair, requests)
    for key, expected in enumerate(plain):
        found = collector.token_ids(key)
        assert found == expected[: len(found)]


def test_a_draft_that_leaves_takes_its_rounds_along(pair: Pair) -> None:
    requests = _requests(SAMPLINGS["seeded"])
    setup = _setup(pair)

    def each_step(step: int) -> None:
        if step == 5:
            setup.engine.detach("embedded")

    collector = run(setup.engine, requests, each_step=each_step)
    assert _tokens(collector, len(requests)) == _plain(pair, requests)
    assert setup.num_drafted > 0
    assert setup.reports[-1].num_drafted == 0


@pytest.mark.parametrize(("num_pages", "num_head_pages"), [(22, 150), (200, 9)])
def test_where_pages_run_out_the_general_path_goes_on(
    pair: Pair, num_pages: int, num_head_pages: int
) -> None:
    requests = _requests(SAMPLINGS["seeded"], StopParams(24))
    setup = _setup(pair, num_pages=num_pages, num_head_pages=num_head_pages)
    collector = run(setup.engine, requests)
    assert _tokens(collector, len(requests)) == _plain(pair, requests)
    assert setup.draft.opened > 0


def test_sequences_beyond_the_lanes_step_beside_them(pair: Pair) -> None:
    lengths = (30, 12, 50, 20)
    requests = [
        request(prompt, SAMPLINGS["seeded"], StopParams(length))
        for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]
    setup = _setup(pair, max_sequences=8, most_in_rounds=2)
    num_lanes, num_running = set[int](), set[int]()

    def each_step(step: int) -> None:
        gauges = setup.engine.gauges_now()
        if gauges.round_shape is not None:
            num_lanes.add(gauges.num_drafted_for)
            num_running.add(gauges.num_running)

    collector = run(setup.engine, requests, each_step=each_step)
    assert _tokens(collector, 4) == _plain(pair, requests)
    assert max(num_lanes) == 2
    assert max(num_running) == 4
    assert setup.draft.opened == 0


def test_rounds_go_on_while_someone_waits_for_pages(pair: Pair) -> None:
    long = request([each % 24 for each in range(105)], SAMPLINGS["greedy"], StopParams(4))
    requests = [*_requests(SAMPLINGS["seeded"], StopParams(30))[:2], long]
    setup = _setup(pair, num_pages=30)
    num_waiting = []

    def each_step(step: int) -> None:
        if setup.engine.gauges_now().round_shape is not None:
            num_waiting.append(setup.engine.gauges_now().num_waiting)

    collector = run(setup.engine, requests, each_step=each_step)
    assert _tokens(collector, 3) == _plain(pair, requests)
    assert num_waiting.count(1) > 3


def test_where_the_device_has_no_memory_for_a_round_the_general_path_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, asked = RoundRunner.launch, []

    def launch_few(runner: RoundRunner, masked: Iterable[int]) -> None:
        asked.append(len(runner.sequence_ids))
        if asked[-1] > 1:
            raise torch.OutOfMemoryError("no room")
        launch(runner, masked)

    monkeypatch.setattr(RoundRunner, "launch", launch_few)
    requests = _requests(SAMPLINGS["greedy"])
    setup = _setup(pair)
    collector = run(setup.engine, requests)
    assert _tokens(collector, len(requests)) == _plain(pair, requests)
    assert max(asked) > 1
    assert setup.draft.opened == len(requests)
    alone = [request([9, 9, 2], SAMPLINGS["greedy"])]
    collector = run(setup.engine, alone)
    assert _tokens(collector, 1) == _plain(pair, alone)
    assert setup.reports[-1].num_drafted > 0


def test_where_the_device_has_no_memory_for_any_round_the_draft_drafts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 64.00 MiB")

    monkeypatch.setattr(RoundFactory, "head_lanes", run_out)
    requests = _requests(SAMPLINGS["greedy"])
    setup = _setup(pair)
    collector = run(setup.engine, requests)
    assert _tokens(collector, len(requests)) == _plain(pair, requests)
    assert setup.draft.opened == len(requests)
    assert "no memory for rounds on the device, the host leads them: 64.00 MiB" in caplog.text


@pytest.mark.parametrize("is_chosen", [False, True], ids=["one shape", "chosen"])
def test_where_the_head_has_no_memory_to_catch_up_the_general_path_goes_on(
    pair: Pair, is_chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all, asked = CatchUp.run, []

    def run_few(catch_up: CatchUp, backlogs: Iterable[HeadBacklog]) -> None:
        found = list(backlogs)
        asked.append(len(found))
        if asked[-1] > 1:
            raise torch.OutOfMemoryError("no room")
        run_all(catch_up, found)

    monkeypatch.setattr(CatchUp, "run", run_few)
    monkeypatch.setattr(LanePolicy, "choose", lambda *asked: asked[3][0] if asked[3] else None)
    requests = _requests(SAMPLINGS["greedy"])
    setup = _setup(pair, other_trees=OTHER_TREES if is_chosen else None)
    collector = run(setup.engine, requests)
    assert _tokens(collector, len(requests)) == _plain(pair, requests)
    assert max(asked) > 1
    alone = [request([9, 9, 2], SAMPLINGS["greedy"])]
    assert _tokens(run(setup.engine, alone), 1) == _plain(pair, alone)
    assert asked[-1] == 1
    assert setup.num_drafted > 0


def _random_request(source: random.Random) -> GenerationRequest:
    sampling = source.choice([*SAMPLINGS.values()] * 2 + [PENALISED])
    prompt = [source.randrange(VOCAB_SIZE) for _ in range(source.choice([1, 3, 4, 9, 17]))]
    num_output = source.randint(1, 24)
    stop = StopParams(
        num_output,
        min_output_tokens=source.choice([0, 0, 0, min(3, num_output)]),
        stop_token_ids=frozenset(source.sample(range(VOCAB_SIZE), 2)),
    )
    grammar = source.choice([None, None, None, regex("(a|b|ab|abc){1,9}"), regex("[abc0-9]*")])
    sampling = replace(sampling, seed=source.randrange(1000))
    return request(prompt, sampling, stop, grammar=grammar)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_any_choice_at_any_step_changes_no_token(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while requests come, one after another."""
    monkeypatch.setattr(LanePolicy, "choose", any_choice(3))
    requests = _requests(SAMPLINGS[name], StopParams(40))
    setup, collector = _setup(pair, is_poisoned=True, other_trees=OTHER_TREES), Collector()
    for key, each in enumerate(requests):
        setup.engine.submit(each, collector, key)
        for _ in range(9):
            setup.engine.step()
    settle(setup.engine)
    assert _tokens(collector, len(requests)) == _plain(pair, requests)
    assert {report.round_shape for report in setup.reports} == {None, TREE, *OTHER_TREES}
    assert setup.draft.opened == 0


@pytest.mark.parametrize(
    ("is_chosen", "seed"),
    [(False, 0), (True, 1)],
    ids=["one shape", "any choice"],
)
def test_random_lives_change_no_token(
    pair: Pair, is_chosen: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of all kinds come and go, pages run short and are poisoned when free."""
    monkeypatch.setattr(LanePolicy, "choose", any_choice(seed))
    source = random.Random(seed)
    requests = [_random_request(source) for _ in range(16)]
    expected = run_plain(pair.decoder, requests)
    others = OTHER_TREES if is_chosen else None
    setup = _setup(pair, num_pages=24, is_poisoned=True, other_trees=others)
    collector = Collector()
    cancelled = set(source.sample(range(16), 3))
    arrivals = sorted((source.randrange(80), key) for key in range(16))
    cancels: list[tuple[int, int]] = []
    for step in range(2000):
        while arrivals and arrivals[0][0] <= step:
            key = arrivals.pop(0)[1]
            setup.engine.submit(requests[key], collector, key)
            if key in cancelled:
                cancels.append((step + source.randint(1, 6), key))
        for when, key in cancels:
            if when == step:
                setup.engine.cancel(collector, key)
        if not setup.engine.step() and not arrivals and step > 90:
            break
    settle(setup.engine)
    for key in set(range(16)) - cancelled:
        assert collector.token_ids(key) == expected.token_ids(key)
        assert collector.finished(key).reason is expected.finished(key).reason
    assert setup.num_drafted > 0
    assert setup.draft.opened == setup.draft.closed
