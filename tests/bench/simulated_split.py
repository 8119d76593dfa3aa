"""A split of a model and its drafts over hardware, and how fast it would decode. Pure Python.

The times are measured or published ones; nothing here runs a model. A round of a batch is

    synchronous:   draft, hop, verify, hop, …                        one after the other
    asynchronous:  verify, and meanwhile draft for the verdicts to come, of which the draft computes
                   the tree under way first; on a hit the next verification starts at once, on a
                   miss the draft is awaited, or the sequence steps plainly

and commits, per sequence, 1 token and the accepted ones. A verification multiplies the weights with
all rows, reads the keys and values of every sequence, and adds up partial sums between devices.
Where answers end, a place is empty until the next request has come, the rounds under way are over
and a step has read its prompt, in which nobody else goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity by a whole number, interpolated between known points and flat beyond them.

    Attributes:
        points: in ascending order of the number.
    """

    points: tuple[tuple[float, float], ...]

    def __call__(self, at: float) -> float:
        """Returns the value."""
        first, last = self.points[0], self.points[-1]
        if at <= first[0]:
            return first[1]
        for (left, low), (right, high) in zip(self.points, self.points[1:], strict=False):
            if at <= right:
                return low + (high - low) * (at - left) / (right - left)
        return last[1]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is known of a target, a draft and the way between them.

    Attributes:
        verify_ms: time of a target step by its rows, on one device.
        draft_step_ms: time of one draft forward by its rows: one a sequence, or where it drafts
            ahead one for each depth of the verdict. Not split over devices.
        acceptance: probability that level d + 1 is accepted where level d was; the last one holds
            for deeper levels.
        hop_ms: round trip of a message between target and draft.
        hit_rate: share of verdicts that a draft that drafts ahead has prepared for.
        num_steps: depths of trees, of which the target chooses the best; 0 decodes plainly.
        nodes_per_step: nodes verified for each level; 1 is a chain.
        batch: sequences that decode at once.
        num_drafts: drafts that share them.
        is_asynchronous: drafts draft ahead while the target verifies.
        is_plain_on_miss: what was not foreseen is a plain step, and nobody waits.
        tensor_parallel: devices that a target step is split over.
        all_reduce_ms: added to a step for each doubling of the devices.
        exchange_row_ms: added for each row and each further device: its partial sums.
        context_ms: of a sequence's keys and values in a step, on one device.
        host_ms: added to each step by the host.
        answer_tokens: after which another sequence takes the place of one; 0 is never.
        request_ms: from the end of an answer to the next request's arrival at the target.
        prompt_ms: of a step that reads prompts.
    """

    verify_ms: Curve
    draft_step_ms: Curve
    acceptance: tuple[float, ...]
    hop_ms: float = 0.0
    hit_rate: float = 0.0
    num_steps: tuple[int, ...] = (0,)
    nodes_per_step: int = 1
    batch: int = 1
    num_drafts: int = 1
    is_asynchronous: bool = False
    is_plain_on_miss: bool = False
    tensor_parallel: int = 1
    all_reduce_ms: float = 0.0
    exchange_row_ms: float = 0.0
    context_ms: float = 0.0
    host_ms: float = 0.0
    answer_tokens: int = 0
    request_ms: float = 0.0
    prompt_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a scenario gives.

    Attributes:
        num_steps: depth of the trees that were chosen.
        round_tokens: committed by a sequence in a round, bonus included.
        verify_ms, draft_ms: of a round, whether or not they overlap.
        wait_ms: part of a round in which the target waits, on average.
        prompts_ms: part in which it reads prompts of others, on average.
        first_token_ms: in which a sequence has no place in rounds yet.
    """

    tokens_per_s: float
    num_steps: int
    round_ms: float
    round_tokens: float
    verify_ms: float
    draft_ms: float
    wait_ms: float
    prompts_ms: float
    first_token_ms: float


ROUNDS_AWAITED = 1.5
"""By a new request among others: what is left of the one under way, and the next, which is launched
before that is read."""


def predict(scenario: Scenario) -> Prediction:
    """Returns the speed of a scenario with the depth of trees that is best for it."""
    found = (_predict(scenario, num_steps) for num_steps in scenario.num_steps)
    return max(found, key=lambda each: each.tokens_per_s)


def _predict(scenario: Scenario, num_steps: int) -> Prediction:
    verify_ms = _step_ms(scenario, num_steps)
    draft_ms = _drafting_ms(scenario, num_steps) if num_steps else 0.0
    wait_ms = _wait_ms(scenario, verify_ms, draft_ms) if num_steps else 0.0
    tokens = _round_tokens(scenario, num_steps)
    prompts_ms = _prompts_ms(scenario, tokens)
    round_ms = verify_ms + wait_ms + prompts_ms
    speed, first_token_ms = 1000.0 * scenario.batch * tokens / round_ms, 0.0
    if scenario.answer_tokens:
        awaited_ms = ROUNDS_AWAITED * round_ms if scenario.batch > 1 else 0.0
        first_token_ms = scenario.request_ms + awaited_ms + scenario.prompt_ms
        answer_ms = scenario.answer_tokens / tokens * round_ms
        speed *= answer_ms / (answer_ms + first_token_ms)
    return Prediction(
        *(speed, num_steps, round_ms, tokens, verify_ms, draft_ms),
        *(wait_ms, prompts_ms, first_token_ms),
    )


def _step_ms(scenario: Scenario, num_steps: int) -> float:
    """Returns the time of a target step over the whole batch."""
    rows = scenario.batch * (1 + num_steps * scenario.nodes_per_step)
    devices = scenario.tensor_parallel
    doublings = devices.bit_length() - 1
    split_ms = scenario.verify_ms(rows) + scenario.batch * scenario.context_ms
    sums_ms = rows * (devices - 1) * scenario.exchange_row_ms
    return split_ms / devices + doublings * scenario.all_reduce_ms + sums_ms + scenario.host_ms


def _drafting_ms(scenario: Scenario, num_steps: int) -> float:
    """Returns the time of a tree for every sequence; drafts of a pool work side by side. Ahead it
    takes one forward more, of the tree under way, and one row for each depth of its verdict."""
    sequences = -(-scenario.batch // scenario.num_drafts)
    if not scenario.is_asynchronous:
        return num_steps * scenario.draft_step_ms(sequences)
    return (num_steps + 1) * scenario.draft_step_ms(sequences * (num_steps + 1))


def _prompts_ms(scenario: Scenario, tokens: float) -> float:
    """Returns what steps that read the prompts of others add to a round: one where at least one
    answer has ended. Plain answers that began together end together."""
    if not scenario.answer_tokens or tokens == 1.0:
        return 0.0
    num_ends = (scenario.batch - 1) * tokens / scenario.answer_tokens
    return (1.0 - math.exp(-num_ends)) * scenario.prompt_ms


def _round_tokens(scenario: Scenario, num_steps: int) -> float:
    """Returns what a sequence commits in a round, bonus included."""
    total, survival = 1.0, 1.0
    for level in range(num_steps):
        survival *= scenario.acceptance[min(level, len(scenario.acceptance) - 1)]
        total += survival
    if num_steps and scenario.is_asynchronous and scenario.is_plain_on_miss:
        return scenario.hit_rate * total + 1 - scenario.hit_rate
    return total


def _wait_ms(scenario: Scenario, verify_ms: float, draft_ms: float) -> float:
    """A hit waits for what a tree and a hop take longer than a verification: its draft begins once
    it has the verdict before. A miss waits for both.

    Misses are private to their rows: those that hit go on, and the share of the batch that misses
    loses a round's wait each.
    """
    miss_ms = scenario.hop_ms + draft_ms
    if not scenario.is_asynchronous:
        return miss_ms
    hit_ms = max(miss_ms - verify_ms, 0.0)
    if scenario.is_plain_on_miss:
        return hit_ms
    return scenario.hit_rate * hit_ms + (1 - scenario.hit_rate) * miss_ms
