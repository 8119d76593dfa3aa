"""The tree that the target verifies now, and the trees pushed for its verdicts. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.candidate_columns import ConditionKey, condition_key
from shared.tokens import TokenTree, Verdict


@dataclass(slots=True)
class InFlightTree:
    """A candidate that was pushed and whose verdict has not arrived.

    Target and draft name it by `candidate_id`. Both choose the next tree by the verdict on this
    one, so they agree on it even if a candidate arrived after the verdict.
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

    def successor(self, verdict: Verdict) -> InFlightTree | None:
        """Returns what the target verifies next; None when nothing was pushed for the verdict."""
        found = self._pushed.get(condition_key(verdict.condition))
        return None if found is None else InFlightTree(*found)
