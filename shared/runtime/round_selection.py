"""First part of a round with pushed trees: selection of the tree that was prepared for the outcome
of the round before.

It takes the place of `RoundDraft` in rounds with a head. A slot without a fitting tree sits the
round out: its rows are computed in vain, and nothing is committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.runtime.host_copy import UploadRing
from shared.runtime.round_batches import RoundBatches, RoundTree
from shared.runtime.round_state import RoundSampling, RoundState
from shared.speculation.tree import NO_TOKEN, rows_of_parents
from shared.tokens import TokenTree

MAX_PREPARED = 64
"""Most prepared trees of one sequence."""

FIRST, COUNT = range(2)
"""Columns of a slot: the index of its first tree, and its number of trees."""
LENGTH, ENDED, BONUS, TREE = range(4)
"""Columns of a tree: its fence, the two numbers of its ending, its tokens, its parents' rows."""
ANY = -1
"""Value of an ending's columns that fits every outcome."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A possible outcome of a sequence's round.

    Attributes:
        row: the last accepted row of its tree; 0 is the root.
        bonus_token_id: the token drawn behind that row.
    """

    row: int
    bonus_token_id: int


@dataclass(frozen=True, slots=True)
class PreparedTree:
    """A tree for the next round of a sequence; an empty one is a plain step.

    Attributes:
        num_tokens: number of committed tokens before the tree.
        ending: outcome of the round before; None fits every outcome.
    """

    num_tokens: int
    tree: TokenTree
    ending: Ending | None = None


class PreparedBlock:
    """The prepared trees of all slots, at a fixed address on the device.

    A round ends, for each sequence, at a row of its tree with a bonus token behind it. The trees
    for the next round are uploaded before that outcome is known, and `RoundSelection` takes the
    tree whose fence and ending match it.

    Args:
        num_slots: S.
        max_rows: most rows of a tree, the root included.
    """

    def __init__(self, num_slots: int, max_rows: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self.device = device
        size = num_slots * (2 + MAX_PREPARED * _num_columns(max_rows))
        # Zeros: no slot has a tree.
        self._numbers = torch.zeros(size, dtype=torch.int64, device=device)
        self._upload = UploadRing(self._numbers)

    @property
    def slots(self) -> Tensor:
        """`[S, 2]` int64, columns `FIRST` and `COUNT`."""
        return self._numbers[: 2 * self._num_slots].view(-1, 2)

    def trees(self, num_rows: int) -> Tensor:
        """Returns `[S * MAX_PREPARED, 3 + 2 * (T - 1)]` int64, the trees as `upload` wrote them.

        Args:
            num_rows: T, the same as in `upload`.
        """
        num_trees, num_columns = self._num_slots * MAX_PREPARED, _num_columns(num_rows)
        start = 2 * self._num_slots
        return self._numbers[start : start + num_trees * num_columns].view(-1, num_columns)

    def upload(
        self, prepared: Mapping[int, Sequence[PreparedTree]], num_rows: int
    ) -> torch.cuda.Event | None:
        """Replaces all trees, in one asynchronous copy. Rounds queued earlier read the old trees.

        Args:
            prepared: trees by slot; other slots get none.
            num_rows: T, at least the nodes of every tree and the root.

        Returns:
            An event behind the copy, valid until the second next call; None on a CPU.
        """
        numbers = [0] * (2 * self._num_slots)
        place = 0
        for slot, trees in prepared.items():
            assert len(trees) <= MAX_PREPARED, f"{len(trees)} trees for one sequence"
            numbers[2 * slot + FIRST], numbers[2 * slot + COUNT] = place, len(trees)
            place += len(trees)
            for tree in trees:
                numbers += _row(tree, num_rows)
        return self._upload.copy(numbers)


def _num_columns(num_rows: int) -> int:
    return TREE + 2 * (num_rows - 1)


def _row(prepared: PreparedTree, num_rows: int) -> list[int]:
    """Returns the columns of one tree."""
    tree, ending = prepared.tree, prepared.ending
    row, bonus = (ANY, ANY) if ending is None else (ending.row, ending.bonus_token_id)
    num_spare = num_rows - 1 - len(tree)
    parents = [0 if parent is None else parent + 1 for parent in tree.parent_indices]
    tokens = [*_distinct(tree), *[NO_TOKEN] * num_spare]
    return [prepared.num_tokens, row, bonus, *tokens, *parents, *[0] * num_spare]


def _distinct(tree: TokenTree) -> Sequence[int]:
    """Returns the tokens of a tree. Of siblings with the same token all but the first get none, so
    that at most one is accepted."""
    seen = set(zip(tree.parent_indices, tree.token_ids, strict=True))
    if len(seen) == len(tree):
        return tree.token_ids
    tokens: list[int] = []
    for key in zip(tree.parent_indices, tree.token_ids, strict=True):
        tokens.append(key[1] if key in seen else NO_TOKEN)
        seen.discard(key)
    return tokens


@dataclass(frozen=True, slots=True, eq=False)
class RoundSelection:
    """Selects trees for all slots of a state, in plain torch.

    Attributes:
        block: prepared trees, uploaded with as many rows as `batches` lays out.
    """

    block: PreparedBlock
    batches: RoundBatches

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """Returns the tree that fits each slot, and writes to the state which slots take part."""
        shape = self.batches.shape
        chosen, is_found = self._match(state)
        state.is_active.copy_(is_found)
        num_nodes = shape.num_tree_rows - 1
        tokens = torch.where(is_found.unsqueeze(1), chosen[:, TREE : TREE + num_nodes], NO_TOKEN)
        parents = torch.where(is_found.unsqueeze(1), chosen[:, TREE + num_nodes :], 0)
        roots = state.roots.unsqueeze(1)
        rows = rows_of_parents(
            torch.cat((roots, tokens), dim=1),
            torch.cat((torch.zeros_like(roots), parents), dim=1),
            shape.tree.num_steps,
        )
        return self.batches.of_trees(state, rows)

    def _match(self, state: RoundState) -> tuple[Tensor, Tensor]:
        """Returns the first fitting tree of each slot, `[S, C]` int64, and whether one fits."""
        slots = self.block.slots[: state.num_slots]
        trees = self.block.trees(self.batches.shape.num_tree_rows)
        steps = torch.arange(MAX_PREPARED, device=slots.device)
        is_own = steps < slots[:, COUNT].unsqueeze(1)
        places = torch.where(is_own, slots[:, FIRST].unsqueeze(1) + steps, 0)
        heads = trees[:, :TREE][places]
        fits = is_own & (heads[..., LENGTH] == state.lengths.unsqueeze(1))
        for column, value in ((ENDED, state.ended_rows), (BONUS, state.roots)):
            wanted = heads[..., column]
            fits &= (wanted == ANY) | (wanted == value.unsqueeze(1))
        first = fits.int().argmax(dim=1, keepdim=True)
        return trees[places.gather(1, first).squeeze(1)], fits.any(dim=1)
