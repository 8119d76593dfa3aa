"""Rounds on the device of a target that several processes hold write what plain decoding writes.

A follower's keys and values are read by every token that comes after them, so that one that it
computed, or moved, in another way would show in the output.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch

from services.ranks import Ranks
from services.target.requests.request import GenerationRequest
from services.target.rounds.policy import LanePolicy
from services.target.step_report import StepReport
from shared.runtime.lockstep import QueueRound
from shared.runtime.round_graphs import RoundGraphs
from shared.runtime.round_runner import RoundRunner
from shared.tokens import SamplingParams, StopParams
from tests.helpers.cut_lanes import OTHER_TREES, TREE, TWO, CutTarget, cut_target
from tests.helpers.engines import (
    VOCAB_SIZE,
    Collector,
    request,
    run,
    run_plain,
    settle,
)
from tests.helpers.masked_requests import masked_requests
from tests.helpers.shared_head_rounds import any_choice

PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [11, 3], [3] * 21)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(seed=7),
    "truncated": SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, seed=1),
    "penalised": SamplingParams(frequency_penalty=0.7, repetition_penalty=1.3, seed=2),
}


CUTS = {
    "heads": (TWO, False),
    "sequences": (TWO, True),
    "stages of heads": (Ranks(2, 2), False),
    "stages of sequences": (Ranks(2, 2), True),
}


@pytest.fixture(scope="module", params=CUTS)
def cut(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CutTarget]:
    """What is spread over the processes is heads of attention, or sequences, and layers."""
    folder, (ranks, spreads_sequences) = tmp_path_factory.mktemp("cut"), CUTS[request.param]
    with cut_target(folder, "cpu", ranks, spreads_sequences=spreads_sequences) as target:
        yield target


def _plain(cut: CutTarget, requests: list[GenerationRequest]) -> Collector:
    return run_plain(cut.whole.decoder, requests)


@pytest.mark.parametrize("name", [*SAMPLINGS, "masked"])
def test_output_is_that_of_plain_decoding(cut: CutTarget, name: str) -> None:
    requests = masked_requests()
    if name in SAMPLINGS:
        requests = [request(prompt, SAMPLINGS[name], StopParams(24)) for prompt in PROMPTS]
    reports: list[StepReport] = []
    engine, collector = cut.drafted(reports.append), Collector()
    for key, each in enumerate(requests):
        engine.submit(each, collector, key)
        for _ in range(3):
            engine.step()
    settle(engine)
    expected = _plain(cut, requests)
    for key in range(len(requests)):
        assert collector.token_ids(key) == expected.token_ids(key)
    rounds = [report for report in reports if report.round_shape is not None]
    assert sum(report.num_accepted for report in rounds) > 0
    # Rounds read the end of a prompt whose beginning another one has computed, where neither
    # penalties nor masks would take it for output.
    num_read = sum(report.num_prompt_rows for report in rounds)
    assert (num_read > 0) is (name not in ("penalised", "masked"))
    # Some tokens come before all have a lane, but none by trees that the host leads.
    assert sum(report.num_drafted for report in reports if report.round_shape is None) == 0


def test_rounds_are_launched_early_enough_for_all_ranks(
    cut: CutTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    leads_s: list[float] = []
    launch = RoundRunner.launch

    def launch_noted(runner: RoundRunner, masked: Iterable[int]) -> None:
        leads_s.append(runner.announce_s)
        launch(runner, masked)

    monkeypatch.setattr(RoundRunner, "launch", launch_noted)
    run(cut.drafted(lambda report: None), [request([1, 2, 3], stop=StopParams(4))])
    assert leads_s
    assert min(leads_s) > 0.0


def _random_request(source: random.Random) -> GenerationRequest:
    sampling = replace(source.choice([*SAMPLINGS.values()]), seed=source.randrange(1000))
    prompt = [source.randrange(VOCAB_SIZE) for _ in range(source.choice([1, 3, 4, 9, 17]))]
    return request(prompt, sampling, StopParams(source.randint(1, 24)))


@pytest.mark.parametrize("is_chosen", [False, True], ids=["one shape", "any choice"])
def test_random_lives_change_no_token(
    cut: CutTarget, is_chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go, some are cancelled, and pages run short, so that some are preempted."""
    monkeypatch.setattr(LanePolicy, "choose", any_choice(5))
    source = random.Random(2)
    requests = [_random_request(source) for _ in range(16)]
    cancelled = set(source.sample(range(16), 3))
    reports: list[StepReport] = []
    num_pages = 24 if cut.runner.pool.num_ranks == 1 else 15
    engine = cut.drafted(reports.append, OTHER_TREES if is_chosen else None, num_pages=num_pages)
    collector = Collector()
    for key, each in enumerate(requests):
        engine.submit(each, collector, key)
        for _ in range(source.randint(1, 5)):
            engine.step()
        for number in cancelled & {key}:
            engine.cancel(collector, number)
    settle(engine)
    expected = _plain(cut, requests)
    for key in set(range(16)) - cancelled:
        assert collector.token_ids(key) == expected.token_ids(key)
    assert sum(report.num_preempted for report in reports) > 0
    shapes = {report.round_shape for report in reports}
    assert shapes == ({None, TREE, *OTHER_TREES} if is_chosen else {None, TREE})


def test_memory_that_runs_out_in_a_round_ends_the_engine(
    cut: CutTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has been told of the round, and would wait for the rest of it."""
    engine, leader = cut.drafted(lambda report: None), cut.runner.leader
    assert leader is not None
    tell = leader.tell

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    def tell_no_round(message: object) -> None:
        """So that the follower can be used on."""
        if not isinstance(message, QueueRound):
            tell(message)

    engine.step()
    monkeypatch.setattr(RoundGraphs, "grow", run_out)
    monkeypatch.setattr(leader, "tell", tell_no_round)
    with pytest.raises(torch.OutOfMemoryError):
        run(engine, [request(PROMPTS[0])])
