"""A split of a model and its drafts over hardware, and how fast it would decode. Pure Python.

The times are measured or published ones; nothing here runs a model. A round of a batch is

    synchronous:   draft, hop, verify, hop, …                        one after the other
    asynchronous:  verify, and meanwhile draft for the verdicts to come; on a hit the next
                   verification starts at once, on a miss the draft is awaited, or the sequence
                   steps plainly

and commits, per sequence, 1 token and the accepted ones.
"""

from __future__ import annotations

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
        draft_step_ms: time of one draft forward by the sequences in it.
        acceptance: probability that level d + 1 is accepted where level d was; the last one holds
            for deeper levels.
        hop_ms: round trip of a message between target and draft.
        hit_rate: share of verdicts that a draft that drafts ahead has prepared for.
        num_steps: depth of trees; 0 decodes plainly.
        nodes_per_step: nodes verified for each level; 1 is a chain.
        batch: sequences that decode at once.
        num_drafts: drafts that share them.
        is_asynchronous: drafts draft ahead while the target verifies.
        is_plain_on_miss: what was not foreseen is a plain step, and nobody waits.
        tensor_parallel: devices that a target step is split over.
        all_reduce_ms: added to a step for each doubling of the devices.
        host_ms: added to each step by the host.
    """

    verify_ms: Curve
    draft_step_ms: Curve
    acceptance: tuple[float, ...]
    hop_ms: float = 0.0
    hit_rate: float = 0.0
    num_steps: int = 0
    nodes_per_step: int = 1
    batch: int = 1
    num_drafts: int = 1
    is_asynchronous: bool = False
    is_plain_on_miss: bool = False
    tensor_parallel: int = 1
    all_reduce_ms: float = 0.0
    host_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a scenario gives.

    Attributes:
        round_tokens: committed by a sequence in a round, bonus included.
        verify_ms, draft_ms: of a round, whether or not they overlap.
        wait_ms: part of a round in which the target waits, on average.
    """

    tokens_per_s: float
    round_ms: float
    round_tokens: float
    verify_ms: float
    draft_ms: float
    wait_ms: float


def predict(scenario: Scenario) -> Prediction:
    """Returns the speed of a scenario."""
    verify_ms = step_ms(scenario)
    if scenario.num_steps == 0:
        speed = 1000.0 * scenario.batch / verify_ms
        return Prediction(speed, verify_ms, 1.0, verify_ms, 0.0, 0.0)
    draft_ms = drafting_ms(scenario)
    wait_ms = _wait_ms(scenario, verify_ms, draft_ms)
    tokens = round_tokens(scenario)
    round_ms = verify_ms + wait_ms
    speed = 1000.0 * scenario.batch * tokens / round_ms
    return Prediction(speed, round_ms, tokens, verify_ms, draft_ms, wait_ms)


def step_ms(scenario: Scenario) -> float:
    """Returns the time of a target step over the whole batch."""
    rows = scenario.batch * (1 + scenario.num_steps * scenario.nodes_per_step)
    devices = scenario.tensor_parallel
    doublings = devices.bit_length() - 1
    return (
        scenario.verify_ms(rows) / devices + doublings * scenario.all_reduce_ms + scenario.host_ms
    )


def drafting_ms(scenario: Scenario) -> float:
    """Returns the time of a tree for every sequence; drafts of a pool work side by side."""
    sequences = -(-scenario.batch // scenario.num_drafts)
    return scenario.num_steps * scenario.draft_step_ms(sequences)


def round_tokens(scenario: Scenario) -> float:
    """Returns what a sequence commits in a round, bonus included."""
    total, survival = 1.0, 1.0
    for level in range(scenario.num_steps):
        survival *= scenario.acceptance[min(level, len(scenario.acceptance) - 1)]
        total += survival
    if scenario.is_asynchronous and scenario.is_plain_on_miss:
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
