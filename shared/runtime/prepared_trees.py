"""Trees that wait on the device for the end of a round: each with the end that it is for.

A round on the device ends, for each sequence, at a row of its tree with a bonus token behind it.
The trees for the round after it are there before that is known, and `RoundSelection` takes the one
whose fence and ending are right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.runtime.upload_ring import UploadRing
from shared.speculation.tree_rows import NO_TOKEN
from shared.tokens import TokenTree

MAX_PREPARED = 64
"""Most trees of one sequence."""

FIRST, COUNT = range(2)
"""Columns of a slot: the first of its trees, and how many there are."""
LENGTH, ENDED, BONUS, TREE = range(4)
"""Columns of a tree: its fence, its ending, then its tokens and the rows of their parents."""
ANY = -1


@dataclass(frozen=True, slots=True)
class Ending:
    """A possible outcome of a sequence's round.

    Attributes:
        row: of its tree, the last that is accepted; 0 is the root.
        bonus_token_id: drawn behind it.
    """

    row: int
    bonus_token_id: int


@dataclass(frozen=True, slots=True)
class PreparedTree:
    """A tree for the next round of a sequence; an empty one is a plain step.

    Attributes:
        num_tokens: committed tokens that it hangs off.
        ending: of the round before it; None is any.
    """

    num_tokens: int
    tree: TokenTree
    ending: Ending | None = None


class PreparedBlock:
    """The prepared trees of all slots, in memory of the device that never moves.

    Args:
        num_slots: S.
        max_rows: most rows of a tree, the root included.
    """

    def __init__(self, num_slots: int, max_rows: int, device: torch.device) -> None:
        self._num_slots = num_slots
        size = num_slots * (2 + MAX_PREPARED * _num_columns(max_rows))
        # No slot has a tree.
        self._numbers = torch.zeros(size, dtype=torch.int64, device=device)
        self._upload = UploadRing(self._numbers)

    @property
    def slots(self) -> Tensor:
        """`[S, 2]` int64, columns `FIRST` and `COUNT`."""
        return self._numbers[: 2 * self._num_slots].view(-1, 2)

    def trees(self, num_rows: int) -> Tensor:
        """Returns `[S * MAX_PREPARED, 3 + 2 * (T - 1)]` int64, the trees as `upload` left them.

        Args:
            num_rows: T, as it was uploaded with.
        """
        num_trees, num_columns = self._num_slots * MAX_PREPARED, _num_columns(num_rows)
        start = 2 * self._num_slots
        return self._numbers[start : start + num_trees * num_columns].view(-1, num_columns)

    def upload(
        self, prepared: Mapping[int, Sequence[PreparedTree]], num_rows: int
    ) -> torch.cuda.Event | None:
        """Replaces all trees by those of some slots, in one copy that nobody waits for: rounds that
        are queued already read what was there before.

        Args:
            num_rows: T, at least the nodes of every tree and the root.

        Returns:
            An event behind the copy, until the second call from now; None on a CPU.
        """
        numbers = [0] * (2 * self._num_slots)
        place = 0
        for slot, own in prepared.items():
            assert len(own) <= MAX_PREPARED, f"{len(own)} trees for one sequence"
            numbers[2 * slot + FIRST], numbers[2 * slot + COUNT] = place, len(own)
            place += len(own)
            for each in own:
                numbers += _row(each, num_rows)
        return self._upload.copy(numbers)


def _num_columns(num_rows: int) -> int:
    return TREE + 2 * (num_rows - 1)


def _row(prepared: PreparedTree, num_rows: int) -> list[int]:
    """Returns the columns of a tree."""
    tree, ending = prepared.tree, prepared.ending
    row, bonus = (ANY, ANY) if ending is None else (ending.row, ending.bonus_token_id)
    num_spare = num_rows - 1 - len(tree)
    parents = [0 if each is None else each + 1 for each in tree.parent_indices]
    tokens = [*_distinct(tree), *[NO_TOKEN] * num_spare]
    return [prepared.num_tokens, row, bonus, *tokens, *parents, *[0] * num_spare]


def _distinct(tree: TokenTree) -> Sequence[int]:
    """Returns the tokens; of siblings with one token all but the first have none, so that at most
    one is accepted."""
    seen = set(zip(tree.parent_indices, tree.token_ids, strict=True))
    if len(seen) == len(tree):
        return tree.token_ids
    tokens: list[int] = []
    for key in zip(tree.parent_indices, tree.token_ids, strict=True):
        tokens.append(key[1] if key in seen else NO_TOKEN)
        seen.discard(key)
    return tokens
