"""Prompts, tree shapes and samplings for tests of drafting ahead, and their outcome counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.draft.drafters.drafter import Drafter
from services.target.engine import Engine
from services.target.requests.request import GenerationRequest
from services.target.step_report import OutcomeTally, StepReport
from shared.tokens import SamplingParams, StopParams, TreeShape
from tests.helpers.engines import Collector, request
from tests.helpers.lossy_draft import LossyDraft

PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [11, 3, 3, 3, 3, 3, 3])
CHAIN, TREE = TreeShape(3, 1, 4), TreeShape(3, 3, 9)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0, seed=7),
    "penalised": SamplingParams(frequency_penalty=0.7, repetition_penalty=1.3, seed=2),
}


def requests(sampling: SamplingParams, num_tokens: int = 20) -> list[GenerationRequest]:
    """Returns one request per prompt, each with its own seed."""
    return [
        request(prompt, replace(sampling, seed=sampling.seed + i), StopParams(num_tokens))
        for i, prompt in enumerate(PROMPTS)
    ]


def outputs(collector: Collector) -> list[list[int]]:
    return [collector.token_ids(key) for key in range(len(PROMPTS))]


def total_outcomes(reports: Iterable[StepReport]) -> OutcomeTally:
    """Returns the sum of the outcome counts of all steps."""
    total = OutcomeTally()
    for report in reports:
        total.add(report.outcomes)
    return total


def num_device_rounds(reports: Iterable[StepReport]) -> int:
    """Returns the number of rounds on the device."""
    return sum(report.num_rounds for report in reports if report.round_shape is not None)


def lossy_draft(engine: Engine, drafter: Drafter, outcome_budget: int, seed: int) -> LossyDraft:
    """Attaches a draft whose delay grows with the seed. Odd seeds have trees and lose messages."""
    shape, loss = ((CHAIN, 0.0), (TREE, 0.2))[seed % 2]
    draft = LossyDraft(engine, drafter, shape, outcome_budget, seed=seed, delay=2 + seed, loss=loss)
    draft.attach()
    return draft
