"""Drafting ahead changes nothing but the speed: any delay, loss, repetition or reconnect.

The target's engine, the wire's messages and the drafters are real; only the sockets are left out,
so that what happens between two steps is the test's to say.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.draft.drafters.ngram import NgramDrafter
from services.target.step_report import OutcomeTally, StepReport
from shared.models.decoder import Decoder
from shared.ngram import NgramOptions
from shared.tokens import SamplingParams, TreeShape
from tests.helpers.ahead_cases import (
    CHAIN,
    PROMPTS,
    SAMPLINGS,
    TREE,
    lossy_draft,
    outputs,
    requests,
    total_outcomes,
)
from tests.helpers.engines import (
    build_engine,
    run,
    run_plain,
    tiny_decoder,
)
from tests.helpers.standalone_drafts import standalone
from tests.helpers.wired_draft import WiredDraft

BUDGET = 6


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def other_decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A draft that is often wrong: other weights, the same vocabulary."""
    return tiny_decoder(tmp_path_factory.mktemp("other"), seed=4)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_good_draft_is_hit_every_round_and_changes_nothing(
    decoder: Decoder, sampling: SamplingParams, shape: TreeShape
) -> None:
    expected = outputs(run_plain(decoder, requests(sampling, 30)))
    reports: list[StepReport] = []
    engine = build_engine(decoder, on_step=reports.append)
    draft = WiredDraft(engine, standalone(decoder), shape, BUDGET)
    draft.attach()
    assert outputs(run(engine, requests(sampling, 30))) == expected
    tally = total_outcomes(reports)
    if sampling.has_penalties:
        assert not tally.num_hits, "passes, which draft ahead, take no penalties"
        return
    # The draft is the target, so it foresees all but the verdicts that its budget leaves out.
    assert tally.num_hits > 5 * max(tally.num_misses, 1)
    assert tally.num_unprepared <= len(PROMPTS)


def test_a_request_may_say_for_how_many_verdicts_is_prepared(decoder: Decoder) -> None:
    asked = requests(SAMPLINGS["sampled"])
    expected = outputs(run_plain(decoder, asked))
    found: list[OutcomeTally] = []
    for num_outcomes in (None, 0, 1):
        reports: list[StepReport] = []
        engine = build_engine(decoder, on_step=reports.append)
        WiredDraft(engine, standalone(decoder), TREE, BUDGET).attach()
        pinned = [replace(each, num_outcomes=num_outcomes) for each in asked]
        assert outputs(run(engine, pinned)) == expected
        found.append(total_outcomes(reports))
    free, none, one = found
    assert free.num_hits > one.num_hits > 0
    assert not none.num_hits + none.num_misses + none.num_late_hits, "nothing is pushed ahead"


@pytest.mark.parametrize(
    ("sampling", "seed"),
    # Each with a draft that is right and with one that is often wrong.
    [
        (each, seed)
        for number, each in enumerate(SAMPLINGS.values())
        for seed in (number % 2, 2 + number % 2)
    ],
)
def test_delays_losses_repetitions_and_reconnects_change_nothing(
    decoder: Decoder, other_decoder: Decoder, sampling: SamplingParams, seed: int
) -> None:
    expected = outputs(run_plain(decoder, requests(sampling)))
    reports: list[StepReport] = []
    engine = build_engine(decoder, on_step=reports.append)
    drafter = standalone((decoder, other_decoder)[seed // 2 % 2])
    draft = lossy_draft(engine, drafter, BUDGET, seed)
    assert outputs(run(engine, requests(sampling), each_step=draft.each_step)) == expected
    drafter.check()
    tally = total_outcomes(reports)
    is_ahead = tally.num_hits + tally.num_misses + tally.num_late_hits > 0
    assert is_ahead != sampling.has_penalties, "passes, which draft ahead, take no penalties"


@pytest.mark.parametrize("num_pages", [9, 14, 20])
def test_short_draft_memory_changes_nothing(decoder: Decoder, num_pages: int) -> None:
    sampling = SAMPLINGS["sampled"]
    expected = outputs(run_plain(decoder, requests(sampling, 20)))
    engine = build_engine(decoder)
    draft = WiredDraft(engine, standalone(decoder, num_pages), TREE, BUDGET)
    draft.attach()
    assert outputs(run(engine, requests(sampling, 20))) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_ngrams_drafted_ahead_change_nothing(decoder: Decoder, sampling: SamplingParams) -> None:
    asked = requests(sampling)
    expected = outputs(run_plain(decoder, asked))
    reports: list[StepReport] = []
    engine = build_engine(decoder, on_step=reports.append)
    drafter = NgramDrafter(NgramOptions())
    WiredDraft(engine, drafter, TreeShape(4, 4, 8), BUDGET).attach()
    for _ in range(2):  # the second time the whole answer has been seen
        reports.clear()
        assert outputs(run(engine, asked)) == expected
    tally = total_outcomes(reports)
    assert tally.num_hits > tally.num_misses


def test_context_that_slides_changes_nothing(decoder: Decoder) -> None:
    asked = requests(SAMPLINGS["sampled"], 90)
    expected = outputs(run_plain(decoder, asked))
    reports: list[StepReport] = []
    engine = build_engine(decoder, on_step=reports.append)
    drafter = standalone(decoder, max_context_tokens=70)
    WiredDraft(engine, drafter, CHAIN, BUDGET).attach()
    assert outputs(run(engine, asked)) == expected
    assert total_outcomes(reports).num_hits > 0
    drafter.check()
