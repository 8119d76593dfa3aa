"""From the logits of a step to the draw of its tokens, by one rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.target.draw import CoupledDraw, Draw, FreshDraw, RowDistributions
from services.target.flag_choices import VerificationMode as VerificationMode
from services.target.path_rules import DrawnChainRule, PathRule, PointMassRule
from services.target.running_counts import RunningCounts
from services.target.sequence import Sequence as TargetSequence
from services.target.step_plan import ScheduledSequence
from services.target.token_masks import TokenMasks
from shared.speculation.block_verification import BLOCK
from shared.speculation.rejection import REJECTION
from shared.speculation.row_sampling import RowSampling, row_sampling
from shared.speculation.tree import row_paths
from shared.speculation.verify import EXACT, Thresholds


class Verifier:
    """Decides by one rule.

    Args:
        generator: on the host; the source of fresh randomness of all rules but the coupled one.
        thresholds: of the point-mass rule; below 1 they are lossy.
    """

    def __init__(
        self,
        mode: VerificationMode,
        *,
        generator: torch.Generator,
        thresholds: Thresholds = EXACT,
    ) -> None:
        self.mode = mode
        self._rule = _path_rule(mode, generator, thresholds)
        self._sampling = _LastSampling()
        self._counts = RunningCounts()
        self._masks = TokenMasks()

    @torch.inference_mode()
    def draw(
        self,
        drawn: Sequence[ScheduledSequence],
        logits: Tensor,
        *,
        positions: Tensor,
        input_ids: Tensor,
    ) -> Draw:
        """Queues the draw of a step; see `RowDistributions` for the arguments.

        The result must be read before the next forward, unless its `token_ids` are there: then it
        needs `logits` no more.

        Args:
            input_ids: `[L]` int64, the token each row computes.
        """
        sampling = self._sampling.of(drawn, logits.device)
        counts = None
        if sampling.penalties is not None:
            counts = self._counts.of(drawn, input_ids, logits.shape[-1])
        # On a GPU the host does this while the forward, which is queued, runs.
        masks = self._masks.of(drawn, logits)
        distributions = RowDistributions(drawn, logits, positions, sampling, counts, masks)
        return (
            CoupledDraw(distributions)
            if self._rule is None
            else FreshDraw(distributions, self._rule)
        )


def _path_rule(
    mode: VerificationMode, generator: torch.Generator, thresholds: Thresholds
) -> PathRule | None:
    """Returns the rule of a mode that uses fresh randomness; None of the coupled one."""
    match mode:
        case VerificationMode.COUPLED:
            return None
        case VerificationMode.POINT_MASS:
            return PointMassRule(generator, thresholds)
        case VerificationMode.REJECTION:
            return DrawnChainRule(REJECTION, generator)
        case VerificationMode.BLOCK:
            return DrawnChainRule(BLOCK, generator)


class _LastSampling:
    """Sampling parameters on the device, kept while the same sequences draw the same rows."""

    def __init__(self) -> None:
        self._num_rows: list[tuple[int, int]] = []
        self._sampling: RowSampling | None = None

    def of(self, drawn: Sequence[ScheduledSequence], device: torch.device) -> RowSampling:
        """Returns the parameters of every row."""
        rules = _RowRules.of(drawn)
        num_rows = [(each.sequence.sequence_id, 1 + len(each.tree)) for each in drawn]
        if self._sampling is None or rules is not None or num_rows != self._num_rows:
            # What is ruled changes with every token.
            self._num_rows = num_rows if rules is None else []
            self._sampling = row_sampling(
                [entry.sequence.sampling for entry in drawn],
                [count for _, count in num_rows],
                device=device,
                banned_token_ids=() if rules is None else rules.banned,
                forced_token_ids=() if rules is None else rules.forced,
            )
        return self._sampling


@dataclass(frozen=True, slots=True)
class _RowRules:
    """The tokens that each row must not draw, and the one token that it must."""

    banned: list[list[int]]
    forced: list[int | None]

    @classmethod
    def of(cls, drawn: Sequence[ScheduledSequence]) -> _RowRules | None:
        """Returns the rules of all rows; None when no row has any."""
        if not any(_has_rules(entry.sequence) for entry in drawn):
            return None
        rows = [(entry.sequence, path) for entry in drawn for path in row_paths(entry.tree)]
        return cls(
            [sorted(sequence.banned_token_ids(path)) for sequence, path in rows],
            [sequence.forced_token_id(path) for sequence, path in rows],
        )


def _has_rules(sequence: TargetSequence) -> bool:
    return sequence.rules is not None or bool(sequence.banned_token_ids(()))
