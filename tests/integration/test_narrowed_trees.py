"""A request that has only part of each tree verified gets the same tokens, in more rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.target.adaptive_config import AdaptiveConfig, Candidates
from services.target.requests.request import GenerationRequest
from services.target.step_report import StepReport
from shared.generation import Delta
from shared.models.decoder import Decoder
from shared.tokens import TreeShape
from tests.helpers.ahead_cases import (
    CHAIN,
    SAMPLINGS,
    TREE,
    lossy_draft,
    outputs,
    requests,
)
from tests.helpers.engines import (
    Collector,
    build_engine,
    run,
    run_plain,
    tiny_decoder,
)
from tests.helpers.standalone_drafts import standalone
from tests.helpers.wired_draft import WiredDraft

BUDGETS = [0, 6]
ALWAYS_ON = AdaptiveConfig({1: Candidates(steps=(1, 2, 3), may_pause=False)})


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def other_decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A draft that is often wrong: other weights, the same vocabulary."""
    return tiny_decoder(tmp_path_factory.mktemp("other"), seed=4)


def _narrow(
    asked: Sequence[GenerationRequest], num_draft_tokens: int | None
) -> list[GenerationRequest]:
    return [replace(each, num_draft_tokens=num_draft_tokens) for each in asked]


def _largest_tree(collector: Collector, keys: Sequence[int] = range(3)) -> int:
    """Returns the most nodes that a round of some requests verified."""
    events = (event for key in keys for event in collector.events[key])
    return max(event.num_drafted for event in events if isinstance(event, Delta))


def _num_rounds(reports: Sequence[StepReport]) -> int:
    return sum(report.num_rounds for report in reports)


# Every pair of shape, budget and adaptation meets, and each sampling meets every choice of each.
@pytest.mark.parametrize(
    ("sampling", "shape", "budget", "is_adaptive"),
    [
        ("greedy", CHAIN, BUDGETS[0], True),
        ("greedy", TREE, BUDGETS[1], False),
        ("sampled", CHAIN, BUDGETS[1], False),
        ("sampled", TREE, BUDGETS[0], True),
        ("penalised", TREE, BUDGETS[1], True),
        ("penalised", CHAIN, BUDGETS[0], False),
    ],
)
def test_trees_are_cut_and_no_token_changes(
    decoder: Decoder,
    sampling: str,
    shape: TreeShape,
    budget: int,
    is_adaptive: bool,
) -> None:
    asked = requests(SAMPLINGS[sampling])
    expected = outputs(run_plain(decoder, asked))
    num_rounds: list[int] = []
    for num_draft_tokens in (None, 3, 1):
        reports: list[StepReport] = []
        engine = build_engine(
            decoder,
            on_step=reports.append,
            poisons_free_pages=True,
            adaptive=ALWAYS_ON if is_adaptive else None,
        )
        drafter = standalone(decoder)
        WiredDraft(engine, drafter, shape, budget).attach()
        collector = run(engine, _narrow(asked, num_draft_tokens))
        assert outputs(collector) == expected
        drafter.check()
        largest = _largest_tree(collector)
        assert largest > 2 if num_draft_tokens is None else largest == num_draft_tokens - 1
        num_rounds.append(_num_rounds(reports))
    # The draft is the target, so each node that is left out costs tokens a round.
    assert num_rounds == sorted(set(num_rounds))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_any_size_beside_others_behind_a_bad_network_changes_nothing(
    decoder: Decoder, other_decoder: Decoder, sampling: str, seed: int
) -> None:
    asked = requests(SAMPLINGS[sampling])
    expected = outputs(run_plain(decoder, asked))
    engine = build_engine(
        decoder,
        num_pages=(200, 40)[seed % 2],
        selects=True,
        adaptive=ALWAYS_ON if seed // 2 else None,
    )
    is_right = seed in (0, 3)
    drafter = standalone(decoder if is_right else other_decoder)
    draft = lossy_draft(engine, drafter, BUDGETS[1], seed)
    sizes = (2, 3, None)
    mixed = [replace(each, num_draft_tokens=size) for each, size in zip(asked, sizes, strict=True)]
    collector = run(engine, mixed, each_step=draft.each_step)
    assert outputs(collector) == expected
    drafter.check()
    if is_right:
        assert sum(collector.finished(key).stats.num_accepted for key in range(3)) > 0
    largest = [_largest_tree(collector, [key]) for key in range(3)]
    assert largest[0] <= 1
    assert largest[1] <= 2
    if not seed // 2:  # else the policy decides on the others
        assert largest[2] > 2
