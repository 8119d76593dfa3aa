"""Cuts the trees that arrived to the nodes that pay. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from services.target.control.course import Course
from services.target.control.cuts import best_cut, path_survivals
from services.target.control.decode_costs import DecodeCosts
from services.target.control.kept import Kept
from services.target.control.probe_budget import ProbeBudget
from shared.tokens import TokenTree

NOT_WORTH_CUTTING = 1.01
"""Trees are verified whole where their rows make a step at most this much longer."""

MOST_CUT = 0.25
"""Share of the steps with trees in which some are worth cutting, from which on that is no
rarity."""

SHARE_SMOOTHING = 0.1
LARGEST_AGE = 256
"""Steps after which the time of a plain one is measured again."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A sequence about to step, with the tree that its draft sent for the round, and when.

    Attributes:
        tree: as much of it as the request allows.
        is_foreseen: the tree was drafted ahead of the round's beginning.
    """

    course: Course
    tree: TokenTree
    heard_s: float
    is_foreseen: bool = False


class TreeCuts:
    """Keeps the nodes that are worth their rows."""

    def __init__(self, costs: DecodeCosts, budget: ProbeBudget) -> None:
        self._costs = costs
        self._budget = budget
        self._share = 0.0

    @property
    def are_rare(self) -> bool:
        """Whether trees could as well be verified whole."""
        return self._share < MOST_CUT

    def count(self, cuts: SequenceOf[Kept | None]) -> None:
        """Takes in what was worth keeping of the trees of a step."""
        if cuts:
            is_any = any(kept is not None for kept in cuts)
            self._share += SHARE_SMOOTHING * (is_any - self._share)

    def of(self, ready: SequenceOf[Ready], num_rows: int, *, may_probe: bool) -> list[Kept | None]:
        """Returns for each tree what to verify; None is the whole tree, as for fixed shapes.

        Args:
            num_rows: of the step without any tree.
            may_probe: a plain step may be taken for its time.
        """
        free = [each for each in ready if each.tree.token_ids and each.course.fixed_wish is None]
        if free and may_probe and self._wants_plain_step(num_rows):
            return [_kept(each, [] if each in free else None) for each in ready]
        num_nodes = sum(len(each.tree) for each in free)
        step_s = self._costs.step_times
        if not free or step_s(num_rows + num_nodes) <= NOT_WORTH_CUTTING * step_s(num_rows):
            return [None] * len(ready)
        survivals = [path_survivals(each.tree, each.course.acceptance) for each in free]
        wait_s = max(self._costs.usual_wait_s(each.course) for each in free)
        cuts = dict(zip(map(id, free), best_cut(survivals, num_rows, wait_s, step_s), strict=True))
        return [_kept(each, cuts.get(id(each))) for each in ready]

    def _wants_plain_step(self, num_rows: int) -> bool:
        """Whether to verify nothing for once, because nobody knows any more what that saves."""
        step_s = self._costs.step_times
        if not self._budget.allows_probe or step_s.age(num_rows) < LARGEST_AGE:
            return False
        self._budget.pay(step_s(num_rows))
        return True


def _kept(ready: Ready, nodes: list[int] | None) -> Kept | None:
    if nodes is None or len(nodes) == len(ready.tree) or ready.course.is_probing:
        return None
    return Kept.of(ready.tree, nodes)
