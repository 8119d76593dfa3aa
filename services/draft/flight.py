"""The tree that the target verifies now, as far as the draft knows, and what was pushed for its
verdicts. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.candidate_columns import ConditionKey, condition_key
from shared.tokens import TokenTree, Verdict


@dataclass(slots=True)
class Flight:
    """A candidate on its way through the target.

    Both sides know it by `candidate_id`: the target selects a pushed candidate only for the
    verdict on this one, and so does `successor`, so they agree on what is verified next whether
    or not the candidate was there when the verdict fell.
    """

    candidate_id: int
    tree: TokenTree
    _pushed: dict[ConditionKey, tuple[int, TokenTree]] = field(default_factory=dict)

    def push(self, condition: ConditionKey, candidate_id: int, tree: TokenTree) -> ConditionKey:
        """Notes a candidate for a verdict on this one; returns the condition that names it."""
        node_index, bonus_token_id, _ = condition
        named = node_index, bonus_token_id, self.candidate_id
        self._pushed[named] = candidate_id, tree
        return named

    def successor(self, verdict: Verdict) -> Flight | None:
        """Returns what the target verifies next; None when nothing was pushed for the verdict."""
        found = self._pushed.get(condition_key(verdict.condition))
        return None if found is None else Flight(*found)
