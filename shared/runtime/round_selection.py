"""First part of a round whose trees came from elsewhere: the one that was prepared for the end of
the round before.

It stands where `RoundDraft` does in rounds with a head. A slot that nothing fits sits the round
out: its rows are computed for nobody, and nothing is committed.
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

    A round on the device ends, for each sequence, at a row of its tree with a bonus token behind
    it. The trees for the round after it are there before that is known, and `RoundSelection` takes
    the one whose fence and ending are right.

    Args:
        num_slots: S.
        max_rows: most rows of a tree, the root included.
    """

    def __init__(self, num_slots: int, max_rows: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self.device = device
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


@dataclass(frozen=True, slots=True, eq=False)
class RoundSelection:
    """Selects for all slots of a state, in plain torch.

    Attributes:
        block: uploaded for trees of as many rows as `batches` lays out.
    """

    block: PreparedBlock
    batches: RoundBatches

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """Returns the tree that fits each slot, and notes in the state who takes part."""
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
        """Returns the first tree that fits each slot, `[S, C]` int64, and whether one does."""
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
