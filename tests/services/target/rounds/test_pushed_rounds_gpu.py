"""On a GPU hits follow each other without the host, and change no token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import pytest
import torch

from services.target.rounds.pushed_rounds import EarlyLaunch
from services.target.step_report import StepReport
from shared.models.decoder import Decoder
from shared.runtime.graphs import GraphLimits
from shared.tokens import SamplingParams, StopParams, TreeShape
from tests.helpers.ahead_cases import CHAIN, SAMPLINGS, TREE, outputs, requests, total_outcomes
from tests.helpers.ahead_draft import AheadDraft
from tests.helpers.engines import build_engine, request, run, tiny_decoder
from tests.helpers.standalone_drafts import standalone
from tests.helpers.wired_draft import WiredDraft

pytestmark = pytest.mark.gpu
GRAPHS = GraphLimits.of(max_sequences=8, max_tree_nodes=16, max_context_tokens=200)
CHOICES: dict[str, Callable[[EarlyLaunch, Iterable[float], float], bool]] = {
    "early": lambda early, rates, response_s: True,
    "asked": lambda early, rates, response_s: False,
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"), torch.device("cuda"))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_output_is_that_of_plain_decoding(
    decoder: Decoder, sampling: str, shape: TreeShape, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EarlyLaunch, "pays", CHOICES[choice])
    asked, reports = requests(SAMPLINGS[sampling]), list[StepReport]()
    engine = build_engine(
        decoder,
        on_step=reports.append,
        graph_limits=GRAPHS,
        poisons_free_pages=True,
        clock=time.monotonic,
        selects=True,
    )
    WiredDraft(engine, standalone(decoder), shape, 6).attach()
    assert outputs(run(engine, asked)) == outputs(run(build_engine(decoder), asked))
    tally = total_outcomes(reports)
    assert tally.num_hits > tally.num_misses
    assert any(each.round_shape is not None for each in reports)


@pytest.mark.parametrize("choice", CHOICES)
def test_misses_change_no_token(
    decoder: Decoder, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EarlyLaunch, "pays", CHOICES[choice])
    sampling, prompts = SamplingParams(seed=7), ([1, 2, 3, 4, 5], [9, 8, 7])
    asked = [request(prompt, sampling, StopParams(90)) for prompt in prompts]
    expected = run(build_engine(decoder), asked)
    answers = [[*prompt, *expected.token_ids(key)] for key, prompt in enumerate(prompts)]
    engine = build_engine(decoder, graph_limits=GRAPHS, poisons_free_pages=True, selects=True)
    AheadDraft(
        engine,
        answers,
        foresees=lambda number, round_: (round_ + number) % 3 != 0,
        recovers=True,
    ).attach()
    short = [request(prompt, sampling, StopParams(60)) for prompt in prompts]
    found = run(engine, short)
    for key in range(2):
        assert found.token_ids(key) == expected.token_ids(key)[:60]
