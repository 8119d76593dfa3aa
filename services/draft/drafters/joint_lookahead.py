"""Drafting ahead for the sequences of a draft of which some have their trees grown in one pass."""

from __future__ import annotations

from services.draft.drafters.drafter import Lookahead, Proposal
from services.draft.drafters.outcome_drafter import OutcomeDrafter
from services.draft.drafters.whole_trees import grows_whole
from services.draft.fan_out import FanOut
from services.draft.sequence import DraftSequence
from shared.tokens import TokenTree, TreeShape


class JointLookahead:
    """See `Lookahead`.

    Args:
        whole: for the sequences that `grows_whole`.
        levels: for the others.
    """

    def __init__(self, whole: Lookahead, levels: OutcomeDrafter) -> None:
        self._whole, self._levels = whole, levels

    @property
    def budget(self) -> int:
        return self._levels.budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._whole.budget = self._levels.budget = budget

    @property
    def has_work(self) -> bool:
        return self._whole.has_work or self._levels.has_work

    def begin(
        self, sequence: DraftSequence, tree: TokenTree, shape: TreeShape, fan_out: FanOut
    ) -> None:
        self._of(sequence).begin(sequence, tree, shape, fan_out)

    def resume(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        return self._of(sequence).resume(sequence, shape)

    def advance(self) -> list[Proposal]:
        proposals = self._whole.advance() if self._whole.has_work else []
        return proposals + (self._levels.advance() if self._levels.has_work else [])

    def _of(self, sequence: DraftSequence) -> Lookahead:
        return self._whole if grows_whole(sequence) else self._levels
