"""Chooses the verdicts to prepare a branch for."""

from __future__ import annotations

from services.draft.drafters.branches import Branch, Plan, Wanted
from services.draft.drafters.grown_rows import GrownRows, Path, paths_of
from services.draft.likely_verdicts import likely_verdicts, rank_of
from services.draft.rank_shares import RankShares
from shared.tokens import TokenTree, TreeShape


class LikelyBranches:
    """Chooses by what may follow the rows of a tree, and by how often the target has taken which of
    its choices."""

    def __init__(self) -> None:
        self._shares = RankShares()

    def wanted(
        self, plan: Plan, tree: TokenTree, rows: GrownRows, behind: Branch | None
    ) -> list[Wanted]:
        """Returns the likeliest verdicts on a tree, as many as the plan takes. Waits for the device
        to find what may follow its nodes.

        Args:
            behind: see `Wanted`.
        """
        paths = list(paths_of(tree))
        continuations = [rows.after(path) for path in paths]
        verdicts = likely_verdicts(tree, continuations, self._shares, plan.fan_out)
        return [Wanted(plan, each, paths[each.place], rows, behind) for each in verdicts]

    def observe(self, rows: GrownRows, path: Path) -> None:
        """Learns which of its choices the target took.

        Args:
            path: the tokens that a verdict commits.
        """
        for depth, token in enumerate(path):
            choices = rows.after(path[:depth])
            if not choices:
                return
            self._shares.observe(rank_of(choices, token))


def num_choices(shape: TreeShape, budget: int) -> int:
    """Returns how many tokens to find after each node: a verdict ends in one that its tree does not
    hold.

    Args:
        budget: verdicts to choose.
    """
    return max(shape.topk + 1, budget) if budget else 0
