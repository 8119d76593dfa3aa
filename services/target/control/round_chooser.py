"""Chooses between plain steps and the shapes of rounds on the device. No torch.

All running sequences go together: a step is plain for all, or a round of one shape for all. The
choice is the one that promises most tokens a second, from measured times and acceptance. What was
not measured for a size of batch is taken for as good as it can be, so it is tried for a few
rounds; what is not in force is probed now and then, within a budget.

Owned by the engine thread. What is chosen changes no token, only who computes it when.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from services.target.control.adaptive_config import AdaptiveConfig, Candidates
from services.target.control.probe_budget import ProbeBudget
from services.target.control.round_acceptance import RoundAcceptance
from services.target.control.round_probes import NUM_PROBE_STEPS, Option, RoundProbes
from services.target.control.round_times import RoundSize, RoundTimes
from services.target.control.step_times import StepTimes
from services.target.sequence import Sequence
from shared.tokens import TreeShape

NUM_TRIAL_STEPS = 10
"""Steps after which a trial ends even if nothing could be measured."""

MIN_STAY = 16
"""Steps between two choices for the same size of batch: to go from rounds to other ones the host
has to read those under way, and the head to catch up."""

MIN_GAIN = 1.04
"""A choice must promise this much more than the one in force to replace it."""

PROBE_AGE = 64
"""Steps for which a choice is not probed again."""

LARGEST_AGE = 512
"""The same for one of which only the time can have changed."""

PROBE_WORTH = 0.5
"""What promises less than this share of the choice in force is not probed."""


@dataclass(frozen=True, slots=True)
class RoundBatch:
    """All running sequences, whose next step can be a round.

    Attributes:
        shapes: that take so many sequences.
        size: of a round of them.
    """

    sequences: SequenceOf[Sequence]
    shapes: tuple[TreeShape, ...]
    size: RoundSize


class RoundChooser:
    """The choice for the rounds of one head.

    Args:
        config: what may be chosen.
        plain_s: seconds of a plain step by its rows.

    Attributes:
        times: of rounds; told by the owner.
    """

    def __init__(self, config: AdaptiveConfig, plain_s: StepTimes) -> None:
        self.times = RoundTimes()
        self._config = config
        self._plain_s = plain_s
        self._acceptance = RoundAcceptance(1.0 - config.candidates(1).smoothing)
        self._settled: Option = None
        self._probes = RoundProbes()
        self._is_trial = False
        self._num_left = 0
        self._situation: tuple[RoundSize, tuple[TreeShape, ...]] | None = None
        self._seen: dict[Option, int] = {}
        self._num_steps = 0
        self._num_in_a_row = 0
        self._last_s: float | None = None

    @property
    def choice(self) -> Option:
        """What is in force."""
        return self._probes.in_force(self._settled)

    @property
    def is_probing(self) -> bool:
        return self._probes.is_under_way

    @property
    def budget(self) -> ProbeBudget:
        return self._probes.budget

    def choose(self, batch: RoundBatch, now_s: float) -> Option:
        """Returns what the next step of all sequences is to be. Called for each step."""
        self._count_step(batch, now_s)
        situation = (batch.size, batch.shapes)
        if situation != self._situation or self._is_due(batch):
            self._situation = situation
            self._decide(batch, now_s)
        self._num_left -= 1
        self._seen[self.choice] = self._num_steps
        if self.choice is None:
            self._probes.num_committed += len(batch.sequences)
        return self.choice

    def interrupt(self, now_s: float) -> None:
        """The next step cannot be a round, whatever pays."""
        if self._num_in_a_row:
            self.times.observe_run(self._num_in_a_row)
            self._probes.end(now_s, None)
        self._num_in_a_row, self._last_s = 0, None

    def observe_round(self, shape: TreeShape, decided: SequenceOf[tuple[Sequence, int]]) -> None:
        """Learns from a round: each sequence and how many nodes of its tree were accepted, those
        behind the output's end included."""
        self._probes.num_committed += len(decided) + sum(count for _, count in decided)
        self._acceptance.observe(shape, decided)

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended."""
        self._acceptance.forget(sequence)

    def _count_step(self, batch: RoundBatch, now_s: float) -> None:
        self._num_steps += 1
        self._num_in_a_row += 1
        if self._last_s is not None:
            self.budget.earn(now_s - self._last_s)
        self._last_s = now_s

    def _is_due(self, batch: RoundBatch) -> bool:
        """Whether it is time to choose again."""
        return self._num_left <= 0 or (self._is_trial and self._is_known(self._settled, batch))

    def _decide(self, batch: RoundBatch, now_s: float) -> None:
        candidates = self._config.candidates(len(batch.sequences))
        promises = self._promises(batch, candidates)
        self._probes.end(now_s, promises.get(self._settled))
        self._settled = self._best(promises, candidates)
        self._is_trial = not self._is_known(self._settled, batch)
        self._num_left = max(candidates.update_interval, MIN_STAY, len(batch.sequences) // 4)
        if self._is_trial:
            self._num_left = NUM_TRIAL_STEPS
        elif not self._warms_up(candidates):
            self._start_probe(batch, promises, now_s)

    def _promises(self, batch: RoundBatch, candidates: Candidates) -> dict[Option, float]:
        """Returns the tokens a second of each choice there is."""
        shapes = _allowed(batch.shapes, candidates)
        num_sequences, plain_s = len(batch.sequences), self._plain_s(len(batch.sequences))
        promises: dict[Option, float] = {}
        if candidates.may_pause or not shapes:
            promises[None] = _rate(num_sequences, plain_s)
        if shapes:
            rows = [self._acceptance.tokens(each, shapes) for each in batch.sequences]
            for shape, tokens in zip(shapes, map(sum, zip(*rows, strict=True)), strict=True):
                promises[shape] = _rate(tokens, self._step_s(shape, batch))
        return promises

    def _step_s(self, option: Option, batch: RoundBatch) -> float:
        """Returns the expected seconds of a step; a round takes no less than a plain one."""
        plain_s = self._plain_s(len(batch.sequences))
        if option is None:
            return plain_s
        round_s = self.times.round_s(option, batch.size)
        return max(round_s, plain_s) + self.times.entry_s(batch.size, self._num_in_a_row)

    def _best(self, promises: Mapping[Option, float], candidates: Candidates) -> Option:
        """Returns the best choice, or the settled one where the gain would be small."""
        best = max(promises, key=lambda option: promises[option])
        shapes = [option for option in promises if option is not None]
        if shapes and self._warms_up(candidates):
            return shapes[0]
        if self._settled not in promises:
            return best
        is_clear = promises[best] >= MIN_GAIN * promises[self._settled]
        return best if is_clear else self._settled

    def _warms_up(self, candidates: Candidates) -> bool:
        return self._acceptance.num_rounds < candidates.num_warm_up_rounds

    def _is_known(self, option: Option, batch: RoundBatch) -> bool:
        """Whether the time of a choice was measured for batches of this size."""
        if option is None:
            return self._plain_s.is_sure(len(batch.sequences))
        return self.times.is_known(option, batch.size)

    def _start_probe(
        self, batch: RoundBatch, promises: Mapping[Option, float], now_s: float
    ) -> None:
        """Puts the best of the other choices in force that come close, if it can tell anything."""
        rate = promises[self._settled]
        telling = [
            option
            for option, promise in promises.items()
            if promise >= PROBE_WORTH * rate and self._can_tell(option, batch)
        ]
        if not telling or not self.budget.allows_probe:
            return
        option = max(telling, key=lambda each: promises[each])
        self._probes.start(option, now_s, rate=rate, step_s=self._step_s(option, batch))
        self._num_left = NUM_PROBE_STEPS

    def _can_tell(self, option: Option, batch: RoundBatch) -> bool:
        """Whether a choice was not in force for so long that what is known of it may be wrong."""
        settled = self._settled
        if option == settled:
            return False
        has_same_levels = option is None or (
            settled is not None
            and option.topk == settled.topk
            and option.num_steps <= settled.num_steps
        )
        # Then only its time may have changed.
        age = LARGEST_AGE if has_same_levels and self._is_known(option, batch) else PROBE_AGE
        return self._num_steps - self._seen.get(option, -age) >= age


def _allowed(shapes: tuple[TreeShape, ...], candidates: Candidates) -> tuple[TreeShape, ...]:
    """Returns the shapes that may be chosen for a batch."""
    if candidates.steps is None:
        return shapes
    return tuple(shape for shape in shapes if shape.num_steps in candidates.steps)


def _rate(tokens: float, duration_s: float) -> float:
    return tokens / duration_s if duration_s > 0 else math.inf
