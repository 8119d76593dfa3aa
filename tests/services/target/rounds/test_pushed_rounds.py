"""Rounds whose trees the device selects change no token, and need the host for no hit."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from services.target.drafts.attachment import Attachment, DraftIdentity, DraftTimeout
from services.target.drafts.feature_store import FeatureSpec
from services.target.launcher import LaunchedStep, Launcher
from services.target.requests.request import GenerationRequest
from services.target.rounds import pushed_rounds
from services.target.rounds.pushed_rounds import EarlyLaunch, PushedSteps
from services.target.rounds.pushed_trees import MIN_ALTERNATING
from services.target.step_report import StepReport
from services.target.verifier import VerificationMode
from shared.candidate_columns import CandidateColumns
from shared.models.decoder import Decoder
from shared.runtime.round_graphs import RoundGraphs
from shared.runtime.selection_runner import SelectionRunner
from shared.tokens import (
    EMPTY_TREE,
    Candidate,
    Condition,
    Outcome,
    SamplingParams,
    StopParams,
    TokenTree,
    TreeShape,
)
from tests.helpers.ahead_cases import (
    CHAIN,
    SAMPLINGS,
    TREE,
    lossy_draft,
    num_device_rounds,
    outputs,
    requests,
    total_outcomes,
)
from tests.helpers.ahead_draft import DEPTH, AheadDraft
from tests.helpers.device_rounds import record_num_computed
from tests.helpers.engines import (
    Collector,
    build_engine,
    request,
    run,
    run_plain,
    settle,
    tiny_decoder,
)
from tests.helpers.masked_requests import masked_requests
from tests.helpers.standalone_drafts import standalone
from tests.helpers.wired_draft import WiredDraft

PROMPTS = ([1, 2, 3, 4, 5], [9, 8, 7])
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(seed=7)
BUDGET = 6
CHOICES: dict[str, Callable[[EarlyLaunch, Iterable[float], float], bool]] = {
    "early": lambda early, rates, response_s: True,
    "asked": lambda early, rates, response_s: False,
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"), num_layers=3)


@pytest.fixture(scope="module")
def other_decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A draft that is often wrong: other weights, the same vocabulary."""
    return tiny_decoder(tmp_path_factory.mktemp("other"), seed=4)


@pytest.fixture(params=CHOICES)
def choice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Launches before it is known that anyone takes part, or asks first."""
    monkeypatch.setattr(EarlyLaunch, "pays", CHOICES[request.param])
    return str(request.param)


def _plain(decoder: Decoder, asked: Sequence[GenerationRequest]) -> list[list[int]]:
    collector = run_plain(decoder, asked)
    return [collector.token_ids(key) for key in range(len(asked))]


def _answers(decoder: Decoder, sampling: SamplingParams, num_tokens: int = 80) -> list[list[int]]:
    asked = [request(prompt, sampling, StopParams(num_tokens)) for prompt in PROMPTS]
    found = _plain(decoder, asked)
    return [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, found, strict=True)]


@dataclass
class Setup:
    """An engine and a draft that knows what it answers to `PROMPTS`."""

    decoder: Decoder
    sampling: SamplingParams = SEEDED
    reports: list[StepReport] = field(default_factory=list)
    overlaps: bool = True
    selects: bool = True

    def __post_init__(self) -> None:
        self.engine = build_engine(
            self.decoder,
            on_step=self.reports.append,
            poisons_free_pages=True,
            overlaps=self.overlaps,
            selects=self.selects,
        )
        self.answers = _answers(self.decoder, self.sampling)
        self.draft = AheadDraft(self.engine, self.answers)
        self.draft.attach()

    def requests(self, num_tokens: int = 40, count: int = 2) -> list[GenerationRequest]:
        return [
            request(prompt, self.sampling, StopParams(num_tokens)) for prompt in PROMPTS[:count]
        ]

    def check(self, collector: Collector, num_tokens: int = 40, count: int = 2) -> None:
        for key, prompt in enumerate(PROMPTS[:count]):
            expected = self.answers[key][len(prompt) : len(prompt) + num_tokens]
            assert collector.token_ids(key) == expected


def test_a_hit_is_launched_before_the_last_round_is_read(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its verdict is told after that."""
    setup, order = Setup(decoder), _recorded(monkeypatch)
    setup.check(run(setup.engine, setup.requests(25, 1)), 25, 1)
    # The first token is the prompt's; 4 a round cover 24 more. No round is launched after those.
    assert order == [*("launch", "launch", "read") * 1, *("launch", "read") * 4, "read"]
    assert [each.outcome for each in setup.draft.verdicts[1:]] == [Outcome.VERIFIED_NEXT_READY] * 5
    assert total_outcomes(setup.reports).hits == {(DEPTH, 0): 5}
    assert sum(each.host_gap_s > 0 for each in setup.reports if each.round_shape) <= 1


def test_one_that_asks_first_launches_before_it_commits(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the order above, and its order: asked, launched, read."""
    monkeypatch.setattr(EarlyLaunch, "pays", CHOICES["asked"])
    setup, order = Setup(decoder), _recorded(monkeypatch)
    setup.check(run(setup.engine, setup.requests(25, 1)), 25, 1)
    assert order == ["launch", *("ask", "launch", "read") * 5, "read"]


def test_a_loop_that_may_not_run_ahead_reads_each_round_first(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, order = Setup(decoder, overlaps=False), _recorded(monkeypatch)
    setup.check(run(setup.engine, setup.requests(25, 1)), 25, 1)
    assert order == ["launch", "read"] * 6


def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    order: list[str] = []

    def record(method: str, name: str) -> None:
        do = getattr(SelectionRunner, method)

        def recorded(runner: SelectionRunner, *arguments: object) -> object:
            order.append(name)
            return do(runner, *arguments)

        monkeypatch.setattr(SelectionRunner, method, recorded)

    record("launch", "launch")
    record("has_chosen", "ask")
    record("result", "read")
    return order


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.usefixtures("choice")
def test_output_is_that_of_plain_decoding(
    decoder: Decoder, sampling: str, shape: TreeShape
) -> None:
    asked, reports = requests(SAMPLINGS[sampling], 30), list[StepReport]()
    engine = build_engine(decoder, on_step=reports.append, poisons_free_pages=True, selects=True)
    WiredDraft(engine, standalone(decoder), shape, BUDGET).attach()
    assert outputs(run(engine, asked)) == outputs(run_plain(decoder, asked))
    tally = total_outcomes(reports)
    assert tally.num_hits > 5 * max(tally.num_misses, 1)
    assert num_device_rounds(reports) > 0.8 * sum(each.num_rounds for each in reports)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("seed", [None, 0, 1], ids=["all foreseen", "late", "lossy"])
@pytest.mark.usefixtures("choice")
def test_a_grammar_keeps_its_lane(decoder: Decoder, shape: TreeShape, seed: int | None) -> None:
    """Masks are computed for the trees that the device chose, and log probabilities beside them."""
    asked, reports = masked_requests(), list[StepReport]()
    engine = build_engine(decoder, on_step=reports.append, poisons_free_pages=True, selects=True)
    if seed is None:
        WiredDraft(engine, standalone(decoder), shape, BUDGET).attach()
        found = run(engine, asked)
    else:
        draft = lossy_draft(engine, standalone(decoder), BUDGET, seed)
        found = run(engine, asked, each_step=draft.each_step)
    expected = run_plain(decoder, asked)
    for key in range(len(asked)):
        assert found.token_ids(key) == expected.token_ids(key)
    assert found.logprobs(3) == expected.logprobs(3)
    draws = sum(each.num_rounds for each in reports)
    assert num_device_rounds(reports) > 0.7 * draws
    assert sum(each.num_accepted for each in reports if each.round_shape) > 0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "sampled"])
def test_many_sequences_are_verified_by_two_rounds_in_turn(
    decoder: Decoder, sampling: SamplingParams
) -> None:
    """A draft that answers verdicts works for one half while the target verifies the other."""
    count, reports = 2 * MIN_ALTERNATING, list[StepReport]()
    asked = [
        request([number % 24, number % 7, 3], sampling, StopParams(20)) for number in range(count)
    ]
    engine = build_engine(
        decoder, max_running=count, on_step=reports.append, poisons_free_pages=True, selects=True
    )
    WiredDraft(engine, standalone(decoder), CHAIN, max_sequences=count).attach()
    expected = run(build_engine(decoder, max_running=count), asked)
    assert outputs(run(engine, asked)) == outputs(expected)
    rounds = [report for report in reports if report.round_shape and report.num_drafted]
    assert sum(each.num_accepted for each in rounds) > count
    assert sum(each.num_rounds == count // 2 for each in rounds) > len(rounds) // 2


@pytest.mark.parametrize(
    ("sampling", "seed"), [("greedy", 0), ("greedy", 3), ("sampled", 2), ("sampled", 5)]
)
def test_delays_losses_repetitions_and_reconnects_change_nothing(
    decoder: Decoder,
    other_decoder: Decoder,
    sampling: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = random.Random(seed)
    monkeypatch.setattr(EarlyLaunch, "pays", lambda early, rates, s: source.random() < 0.5)
    asked, reports = requests(SAMPLINGS[sampling]), list[StepReport]()
    engine = build_engine(decoder, on_step=reports.append, poisons_free_pages=True, selects=True)
    drafter = standalone((decoder, other_decoder)[seed // 2 % 2])
    draft = lossy_draft(engine, drafter, BUDGET, seed)
    found = outputs(run(engine, asked, each_step=draft.each_step))
    assert found == outputs(run_plain(decoder, asked))
    drafter.check()
    tally = total_outcomes(reports)
    assert tally.num_hits + tally.num_misses + tally.num_late_hits > 0, "nothing was drafted ahead"
    assert num_device_rounds(reports) > 0


@pytest.mark.usefixtures("choice")
def test_a_sequence_that_misses_delays_no_other(decoder: Decoder) -> None:
    """It sits a round out while its draft sends a tree for the verdict; the other goes on."""
    setup = Setup(decoder)
    setup.draft.foresees = lambda number, round_: number == 0 or round_ % 3 != 0
    setup.draft.recovers = True
    collector = run(setup.engine, setup.requests(37))
    setup.check(collector, 37)
    first, second = (collector.finished(key).stats for key in range(2))
    assert first.num_rounds == second.num_rounds == 10
    sizes = [each.num_rounds for each in setup.reports if each.round_shape is not None]
    assert sizes[:3] == [2, 2, 2]
    assert 1 in sizes[3:]
    assert total_outcomes(setup.reports).num_misses >= 2


@pytest.mark.usefixtures("choice")
def test_a_stale_fence_is_never_verified(decoder: Decoder) -> None:
    """Trees for other states than the one the verdict leaves, as of a draft that counts wrong."""
    setup = Setup(decoder)
    source = random.Random(3)

    def falsify(attachment_id: str, candidates: Sequence[Candidate]) -> None:
        off = [int(source.random() < 0.3) for _ in candidates]
        falsified = [
            replace(each, committed_token_count=each.committed_token_count + by)
            for each, by in zip(candidates, off, strict=True)
        ]
        setup.engine.offer(attachment_id, CandidateColumns.of(falsified))

    setup.draft.offer = falsify
    collector = Collector()
    for key, each in enumerate(setup.requests(40)):
        setup.engine.submit(each, collector, key)
    for _ in range(60):
        setup.engine.step()
    for key, prompt in enumerate(PROMPTS):
        found = collector.token_ids(key)
        assert found == setup.answers[key][len(prompt) : len(prompt) + len(found)]
        setup.engine.cancel(collector, key)
    settle(setup.engine)


def test_an_ending_that_cannot_be_is_no_hit(decoder: Decoder) -> None:
    """A node that the tree does not have, a token that no vocabulary has."""
    setup = Setup(decoder)
    setup.draft.recovers = True
    source = random.Random(4)

    def falsify(attachment_id: str, candidates: Sequence[Candidate]) -> None:
        falsified = []
        for each in candidates:
            condition = each.condition
            if condition is not None and source.random() < 0.3:
                condition = source.choice(
                    [replace(condition, node_index=9), replace(condition, bonus_token_id=2**32 - 1)]
                )
            falsified.append(replace(each, condition=condition))
        setup.engine.offer(attachment_id, CandidateColumns.of(falsified))

    setup.draft.offer = falsify
    collector = Collector()
    setup.engine.submit(setup.requests(60, 1)[0], collector, 0)
    for _ in range(60):
        setup.engine.step()
    found = collector.token_ids(0)
    assert found == setup.answers[0][len(PROMPTS[0]) :][: len(found)]
    assert num_device_rounds(setup.reports) > 0
    setup.engine.cancel(collector, 0)
    settle(setup.engine)


@pytest.mark.usefixtures("choice")
def test_nothing_is_prepared_behind_an_empty_tree_with_a_name(decoder: Decoder) -> None:
    """No draft announces one; the verdict on it names no candidate, so it selects none either."""
    setup = Setup(decoder)
    answer = setup.answers[0]

    def falsify(attachment_id: str, candidates: Sequence[Candidate]) -> None:
        falsified = []
        for each in candidates:
            count, own_id = each.committed_token_count, each.candidate_id
            if each.condition is not None or own_id is None:
                continue
            named = Condition(None, answer[count], own_id)
            tree = TokenTree.chain(answer[count + 1 : count + 4])
            falsified += [
                replace(each, tree=EMPTY_TREE),
                replace(each, tree=tree, candidate_id=own_id + 1, condition=named),
            ]
        setup.engine.offer(attachment_id, CandidateColumns.of(falsified))

    setup.draft.offer = falsify
    setup.draft.recovers = True
    setup.check(run(setup.engine, setup.requests(40, 1)), 40, 1)


def test_who_is_refused_hears_of_it_while_others_wait_for_their_draft(decoder: Decoder) -> None:
    setup, collector = Setup(decoder), Collector()
    setup.engine.submit(setup.requests(40, 1)[0], collector, 0)
    while not num_device_rounds(setup.reports):
        setup.engine.step()
    setup.draft.is_held = True
    while setup.engine.step():
        pass
    assert not collector.has_ended(0)
    setup.engine.submit(replace(setup.requests()[1], draft_algorithm="NONE"), collector, 1)
    setup.engine.step()
    assert collector.failure(1).error.reason == "ALGORITHM_UNKNOWN"


@pytest.mark.usefixtures("choice")
def test_late_blocks_are_verified_all_the_same(decoder: Decoder) -> None:
    setup = Setup(decoder)
    setup.draft.is_held = True

    def each_step(step: int) -> None:
        if step % 3 == 2:
            setup.draft.release()

    setup.check(run(setup.engine, setup.requests(40, 1), each_step=each_step), 40, 1)
    tally = total_outcomes(setup.reports)
    assert tally.num_late_hits > 1
    assert num_device_rounds(setup.reports) > 5


@pytest.mark.usefixtures("choice")
@pytest.mark.parametrize("step", range(2, 8))
def test_a_draft_that_dies_in_a_round_costs_no_token(decoder: Decoder, step: int) -> None:
    setup = Setup(decoder)

    def each_step(now: int) -> None:
        if now == step:
            assert setup.engine._loop._pushed.is_under_way
            setup.engine.detach("ahead")

    setup.check(run(setup.engine, setup.requests(40), each_step=each_step), 40)
    assert setup.reports[-1].round_shape is None


@pytest.mark.usefixtures("choice")
@pytest.mark.parametrize("step", range(2, 7))
def test_a_sequence_cancelled_in_a_round_leaves_its_pages(decoder: Decoder, step: int) -> None:
    setup, collector = Setup(decoder), Collector()
    for key, each in enumerate(setup.requests(60)):
        setup.engine.submit(each, collector, key)
    for _ in range(step):
        setup.engine.step()
    setup.engine.cancel(collector, 0)
    for _ in range(3):
        setup.engine.step()
    found = collector.token_ids(0)
    assert found == setup.answers[0][len(PROMPTS[0]) : len(PROMPTS[0]) + len(found)]
    settle(setup.engine)
    assert collector.token_ids(1) == setup.answers[1][len(PROMPTS[1]) :][:60]


@pytest.mark.usefixtures("choice")
def test_stops_are_where_they_were(decoder: Decoder) -> None:
    setup = Setup(decoder)
    stop_ids = frozenset({setup.answers[0][20], setup.answers[1][14]})
    asked = [request(prompt, SEEDED, StopParams(60, stop_token_ids=stop_ids)) for prompt in PROMPTS]
    collector, expected = run(setup.engine, asked), run_plain(decoder, asked)
    for key in range(2):
        assert collector.token_ids(key) == expected.token_ids(key)
        assert collector.finished(key).reason == expected.finished(key).reason
        assert collector.finished(key).stop_token_id == expected.finished(key).stop_token_id
    assert num_device_rounds(setup.reports) > 2


@pytest.mark.usefixtures("choice")
@pytest.mark.parametrize(
    "other",
    [
        request([5, 4, 3], GREEDY, StopParams(9), top_logprobs=2, speculation_disabled=True),
        replace(request(PROMPTS[0], SEEDED, StopParams(9)), num_draft_tokens=2),
    ],
    ids=["logprobs", "width"],
)
def test_a_request_that_has_no_lane_steps_beside_those_that_have(
    decoder: Decoder, other: GenerationRequest
) -> None:
    """It comes while the others have lanes, which they keep."""
    setup, collector = Setup(decoder), Collector()
    setup.draft.recovers = True  # it foresees no end that a narrowed tree can have
    for key, each in enumerate(setup.requests(60)):
        setup.engine.submit(each, collector, key)
    for _ in range(4):
        setup.engine.step()
    assert setup.engine.gauges_now().round_shape is not None
    setup.engine.submit(other, collector, 2)
    num_before = len(setup.reports)
    while not collector.has_ended(2):
        setup.engine.step()
    beside = [each.round_shape is not None for each in setup.reports[num_before:]]
    assert beside.count(False) > 2
    assert beside.count(True) > 2
    settle(setup.engine)
    setup.check(collector, 60)
    assert collector.token_ids(2) == _plain(decoder, [other])[0]


@pytest.mark.usefixtures("choice")
def test_prompts_that_come_later_join(decoder: Decoder) -> None:
    setup, collector = Setup(decoder), Collector()
    for key, each in enumerate(setup.requests(60)):
        setup.engine.submit(each, collector, key)
        for _ in range(5):
            setup.engine.step()
    settle(setup.engine)
    setup.check(collector, 60)
    assert max(each.num_rounds for each in setup.reports if each.round_shape is not None) == 2


@pytest.mark.usefixtures("choice")
@pytest.mark.parametrize("num_pages", [12, 20])
def test_where_pages_run_out_the_general_path_goes_on(decoder: Decoder, num_pages: int) -> None:
    asked, reports = requests(SAMPLINGS["sampled"], 24), list[StepReport]()
    engine = build_engine(
        decoder,
        num_pages=num_pages,
        on_step=reports.append,
        poisons_free_pages=True,
        selects=True,
    )
    WiredDraft(engine, standalone(decoder), TREE, BUDGET).attach()
    assert outputs(run(engine, asked)) == outputs(run_plain(decoder, asked))
    assert num_device_rounds(reports) > 0


def test_where_the_device_has_no_memory_for_a_round_the_general_path_goes_on(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, asked = SelectionRunner.prepare, list[int]()

    def prepare_few(runner: SelectionRunner, *arguments: object) -> None:
        asked.append(len(runner.sequence_ids))
        if asked[-1] > 1:
            raise torch.OutOfMemoryError("no room")
        prepare(runner, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SelectionRunner, "prepare", prepare_few)
    setup = Setup(decoder)
    setup.check(run(setup.engine, setup.requests(40)), 40)
    assert asked[0] == 2
    assert set(asked[1:]) == {1}, "one keeps its lane, the other steps beside it"
    setup.check(run(setup.engine, setup.requests(40, 1)), 40, 1)
    assert set(asked[1:]) == {1}


@pytest.mark.parametrize("part", ["forward", "commit"])
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.usefixtures("choice")
def test_where_a_round_breaks_off_for_lack_of_memory_fewer_sequences_go_on(
    decoder: Decoder, part: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    do, calls = getattr(RoundGraphs, part), itertools.count()
    asked, reports = masked_requests(), list[StepReport]()
    expected = run_plain(decoder, asked)

    def do_few(graphs: RoundGraphs, *arguments: object) -> object:
        if first <= next(calls) < first + 2:
            raise torch.OutOfMemoryError("no room")
        return do(graphs, *arguments)

    monkeypatch.setattr(RoundGraphs, part, do_few)
    engine = build_engine(decoder, on_step=reports.append, poisons_free_pages=True, selects=True)
    WiredDraft(engine, standalone(decoder), TREE, BUDGET).attach()
    found = run(engine, asked)
    for key in range(len(asked)):
        assert found.token_ids(key) == expected.token_ids(key)
    assert next(calls) > first + 2, "rounds went on"
    assert num_device_rounds(reports) > 0


@pytest.mark.usefixtures("choice")
def test_places_of_those_that_have_ended_are_given_up(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eighteen sequences, of which only the last goes on for long."""
    sizes = record_num_computed(monkeypatch)
    prompts, lengths = [[1 + key, 2] for key in range(18)], [6] * 17 + [40]
    plain = run(
        build_engine(decoder, max_running=32),
        [request(prompt, GREEDY, StopParams(60)) for prompt in prompts],
    )
    answers = [[*prompt, *plain.token_ids(key)] for key, prompt in enumerate(prompts)]
    engine = build_engine(decoder, max_running=32, poisons_free_pages=True, selects=True)
    AheadDraft(engine, answers).attach()
    asked = [
        request(prompt, GREEDY, StopParams(length))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    found = run(engine, asked)
    for key, (answer, length) in enumerate(zip(answers, lengths, strict=True)):
        assert found.token_ids(key) == answer[2 : 2 + length]
    assert max(sizes) == 24
    assert sizes[-1] == 1


def _random_request(source: random.Random) -> GenerationRequest:
    prompt = [source.randrange(24) for _ in range(source.choice((1, 2, 5, 9, 40)))]
    sampling = source.choice(
        (
            GREEDY,
            SamplingParams(seed=source.randrange(99)),
            SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=source.randrange(99)),
            SamplingParams(frequency_penalty=0.7, presence_penalty=0.5, seed=source.randrange(99)),
            SamplingParams(temperature=0.0, repetition_penalty=1.4, logit_bias={7: 2.0}),
        )
    )
    stop = StopParams(source.randrange(5, 40), min_output_tokens=source.choice((0, 0, 5)))
    asked = request(prompt, sampling, stop, top_logprobs=source.choice((None, None, 0, 2)))
    if source.random() < 0.2:
        return replace(asked, num_draft_tokens=2)  # has no lane
    return replace(asked, speculation_disabled=source.random() < 0.1)


@pytest.mark.parametrize("seed", range(2))
def test_random_lives_change_no_token(
    decoder: Decoder, other_decoder: Decoder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of all kinds come, are cancelled and preempted beside one another, while the draft
    is late, loses what it says, and comes and goes."""
    source = random.Random(seed)
    monkeypatch.setattr(EarlyLaunch, "pays", lambda early, rates, s: source.random() < 0.5)
    asked = [_random_request(source) for _ in range(10)]
    expected = run_plain(decoder, asked)
    reports = list[StepReport]()
    engine = build_engine(
        decoder,
        num_pages=source.choice((24, 60, 200)),
        max_running=source.choice((3, 8)),
        on_step=reports.append,
        poisons_free_pages=True,
        selects=True,
    )
    draft = lossy_draft(engine, standalone((decoder, other_decoder)[seed % 2]), BUDGET, seed)
    collector, submitted, cancelled = Collector(), 0, set[int]()
    step = 0
    while submitted < len(asked) or not all(
        map(collector.has_ended, set(range(len(asked))) - cancelled)
    ):
        if submitted < len(asked) and source.random() < 0.2:
            engine.submit(asked[submitted], collector, submitted)
            submitted += 1
        if submitted and source.random() < 0.02:
            key = source.randrange(submitted)
            if not collector.has_ended(key):
                engine.cancel(collector, key)
                cancelled.add(key)
        engine.step()
        draft.each_step(step)
        step += 1
    for key in range(len(asked)):
        found = collector.token_ids(key) if key in collector.events else []
        if key in cancelled:
            assert found == expected.token_ids(key)[: len(found)]
        else:
            assert found == expected.token_ids(key), key
            pairs = zip(collector.logprobs(key), expected.logprobs(key), strict=True)
            assert all(a.log_prob == pytest.approx(b.log_prob, abs=1e-4) for a, b in pairs)
    engine.check_idle()
    assert num_device_rounds(reports) > 20


@pytest.mark.parametrize("selects", [True, False], ids=["lanes", "planned"])
def test_what_is_left_of_a_late_tree_is_verified(
    decoder: Decoder, *, selects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree for a round that goes without it comes while that round is under way."""
    launch, launched = Launcher.launch, list[LaunchedStep]()

    def recorded(*args: Any, **kwargs: Any) -> LaunchedStep:
        launched.append(launch(*args, **kwargs))
        return launched[-1]

    monkeypatch.setattr(Launcher, "launch", recorded)
    setup = Setup(decoder, selects=selects)
    setup.engine.detach("ahead")
    identity = DraftIdentity("late", "late", "m", "SCRIPTED", 64, 0.0)
    draft = AheadDraft(setup.engine, setup.answers, name="late", is_held=True, recovers=True)
    draft.foresees = lambda number, round_: False
    attachment = Attachment(identity, draft, DraftTimeout(0.0))  # nobody waits for it
    setup.engine.attach(attachment)
    collector = Collector()
    for key, each in enumerate(setup.requests(60)):
        setup.engine.submit(each, collector, key)
    while not all(map(collector.has_ended, range(2))):
        setup.engine.step()
        draft.release()
    setup.check(collector, 60)
    assert sum(each.num_accepted for each in setup.reports) > 10
    with_trees = [each for each in launched if any(entry.tree for entry in each.plan.scheduled)]
    assert bool(with_trees) is not selects
    assert not any(each.allows_run_ahead for each in with_trees)


def test_sequences_without_a_draft_go_along(decoder: Decoder) -> None:
    """The draft has room for one."""
    setup = Setup(decoder)
    setup.engine.detach("ahead")
    draft = AheadDraft(setup.engine, setup.answers, name="narrow", max_sequences=1)
    draft.attach()
    setup.check(run(setup.engine, setup.requests(40)), 40)
    sizes = [each.num_rounds for each in setup.reports if each.round_shape is not None]
    assert sizes.count(2) > 5


@pytest.mark.usefixtures("choice")
def test_sequences_of_a_silent_draft_leave_it_between_rounds(decoder: Decoder) -> None:
    setup = Setup(decoder)
    silent = AheadDraft(setup.engine, setup.answers, name="silent", is_held=True)
    identity = DraftIdentity(silent.name, silent.name, "m", "SCRIPTED", 64, 0.0)
    setup.engine.attach(Attachment(identity, silent, DraftTimeout(2.0, _probe_s=math.inf)))
    setup.check(run(setup.engine, setup.requests(60)), 60)
    assert 0 < len(silent.verdicts) < 8, "one of the sequences was there first"
    rounds = [each for each in setup.reports if each.round_shape is not None]
    both = [each for each in rounds if each.num_committed == 2 * (DEPTH + 1)]
    assert len(both) > 3, "then both were at the other draft"


@pytest.mark.parametrize("choice", CHOICES)
def test_a_draft_gets_the_features_of_the_general_path(
    decoder: Decoder, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EarlyLaunch, "pays", CHOICES[choice])
    projection = torch.randn((8, 64), generator=torch.Generator().manual_seed(1))
    spec = FeatureSpec("key", (1, 4), torch.float32, projection)
    found = []
    for selects in (False, True):
        setup = Setup(decoder, selects=selects)
        setup.engine.detach("ahead")
        draft = AheadDraft(setup.engine, setup.answers, name="head", feature_spec=spec)
        draft.foresees = lambda number, round_: round_ % 3 != 0
        draft.recovers = True
        draft.attach()
        setup.check(run(setup.engine, setup.requests(40)), 40)
        assert (num_device_rounds(setup.reports) > 0) == selects
        found.append(
            {key: torch.cat([e.rows for e in rows]) for key, rows in draft.features.items()}
        )
        for rows in draft.features.values():
            assert [each.position_offset for each in rows[1:]] == [each.end for each in rows[:-1]]
    for key, expected in found[0].items():
        shortest = min(len(expected), len(found[1][key]))
        assert shortest > 30
        assert torch.equal(found[1][key][:shortest], expected[:shortest])


def test_where_there_is_no_memory_to_keep_features_of_rounds_the_general_path_goes_on(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, tried = Setup(decoder), list[str]()

    def fail(**arguments: object) -> SelectionRunner:
        tried.append("once")
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(pushed_rounds, "SelectionRunner", fail)
    setup.engine.detach("ahead")
    spec = FeatureSpec("key", (1, 4), torch.float32, None)
    draft = AheadDraft(setup.engine, setup.answers, name="head", feature_spec=spec)
    draft.recovers = True
    draft.attach()
    setup.check(run(setup.engine, setup.requests(40)), 40)
    assert tried == ["once"]
    assert num_device_rounds(setup.reports) == 0
    assert draft.features


def test_features_of_others_have_holes_where_rounds_kept_none(decoder: Decoder) -> None:
    """A head leaves, rounds go on for a draft without features, and the head comes back."""
    setup = Setup(decoder)
    spec = FeatureSpec("key", (1, 4), torch.float32, None)
    head = AheadDraft(setup.engine, setup.answers, name="head", feature_spec=spec)
    setup.engine.detach("ahead")
    head.attach()
    setup.draft.recovers = True
    num_before: list[int] = []

    def each_step(step: int) -> None:
        if step == 5:
            setup.engine.detach("head")
            setup.draft.attach()
        if step == 12:
            num_before.append(len(head.features[0]))
            setup.engine.detach("ahead")
            head.attach()

    setup.check(run(setup.engine, setup.requests(60), each_step=each_step), 60)
    first, *others = head.features[0][num_before[0] :]
    assert first.position_offset > head.features[0][num_before[0] - 1].end
    assert others


def test_where_the_host_decides_rounds_step_aside(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PushedSteps, "_launch_ready", None)
    engine = build_engine(decoder, selects=True, mode=VerificationMode.POINT_MASS)
    answers = _answers(decoder, GREEDY)
    AheadDraft(engine, answers, recovers=True).attach()
    collector = run(engine, [request(PROMPTS[0], GREEDY)])
    assert collector.token_ids(0) == answers[0][len(PROMPTS[0]) :][:24]


def test_launching_early_is_weighed_against_a_round_for_nobody() -> None:
    early = EarlyLaunch()
    assert early.pays([0.1], 0.0)  # nothing is known of the time of rounds
    early.observe(0.008)
    assert early.pays([1.0], 0.0)
    assert not early.pays([0.8], 0.004)
    assert early.pays([0.8], 0.009)  # the tree for the verdict takes longer than a round
    assert early.pays([0.8] * 4, 0.004)
    assert not early.pays([0.8] * 2, 0.004)
