"""Rounds as CUDA graphs of several shapes, and plain steps between them, change no token."""

from __future__ import annotations

import pytest
import torch

from services.target.adaptive_config import DEFAULT_CONFIG
from services.target.rounds.policy import LanePolicy
from services.target.step_report import StepReport
from shared.runtime.graphs import GraphLimits
from shared.tokens import SamplingParams, StopParams, TreeShape
from tests.helpers.device_rounds import Pair
from tests.helpers.engines import Collector, build_engine, request, run, settle
from tests.helpers.masked_requests import masked_requests
from tests.helpers.shared_head_rounds import SilentDraft, any_choice, sharing_head, write_pair

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TREE = TreeShape(3, 3, 9)
OTHER_TREES = {TreeShape(4, 1, 5): 8, TreeShape(1, 5, 6): 3}
GRAPHS = GraphLimits.of(max_sequences=8, max_tree_nodes=16, max_context_tokens=200)
PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [11, 3], [3] * 21)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(seed=7),
    "truncated": SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, seed=1),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head"), CUDA)


@pytest.mark.parametrize("name", [*SAMPLINGS, "masked"])
def test_any_choice_at_any_step_changes_no_token(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanePolicy, "choose", any_choice(3))
    requests = masked_requests()
    if name in SAMPLINGS:
        requests = [request(prompt, SAMPLINGS[name], StopParams(60)) for prompt in PROMPTS]
    expected = run(build_engine(pair.decoder), requests)
    reports: list[StepReport] = []
    engine = build_engine(
        pair.decoder,
        graph_limits=GRAPHS,
        poisons_free_pages=True,
        adaptive=DEFAULT_CONFIG,
        on_step=reports.append,
    )
    engine.attach(sharing_head(pair, SilentDraft(), TREE, OTHER_TREES))
    collector = Collector()
    for key, each in enumerate(requests):
        engine.submit(each, collector, key)
        for _ in range(9):
            engine.step()
    settle(engine)
    for key in range(len(requests)):
        assert collector.token_ids(key) == expected.token_ids(key)
    assert {report.round_shape for report in reports} == {None, TREE, *OTHER_TREES}
