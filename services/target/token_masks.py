"""Masks of the tokens that grammars and rules allow at each row of a tree: the root, then nodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.target.grammars.matcher import MaskedTree, MaskExecutor, Masks
from services.target.scheduler import ScheduledSequence
from services.target.sequence import Sequence, TokenRules
from shared.kv.upload import uploaded_numbers
from shared.runtime.host_copy import UploadMemory
from shared.speculation.row_sampling import (
    ALL_TOKENS,
    WORD_BITS,
    TreeMasks,
    mask_logits,
    num_mask_words,
)
from shared.speculation.tree import row_paths
from shared.speculation.verify import AcceptedPath
from shared.tokens import TokenTree


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of some of the R rows of a step.

    Attributes:
        rows, words: arguments of `mask_logits`, on the device.
        may_draw: `[R]` bool on the host; False for the rows of nodes that their grammar forbids,
            and for rows beyond a bound of the matcher. Tokens drawn by such rows are meaningless.
    """

    rows: Tensor
    words: Tensor
    may_draw: NDArray[np.bool_]

    def applied(self, logits: Tensor) -> Tensor:
        """Returns a copy of `logits` `[R, V]` without the tokens that rows may not draw."""
        masked = logits.clone()
        mask_logits(masked, self.rows, self.words)
        return masked

    def cut(self, path: AcceptedPath, tree: TokenTree, first_row: int) -> AcceptedPath:
        """Ends a path at the first node whose row may not draw; its token becomes the bonus token.

        Rows that may not draw still have a distribution, without the grammar. So the decisions
        above them are right under every verification rule.
        """
        for num_accepted, node in enumerate(path.node_indices):
            if not self.may_draw[first_row + 1 + node]:
                return AcceptedPath(path.node_indices[:num_accepted], tree.token_ids[node])
        return path


class TokenMasks:
    """Computes masks on the host, at the same time as the forward if that runs on a GPU."""

    def __init__(self) -> None:
        self._executor = MaskExecutor()

    def of(
        self, drawn: SequenceOf[ScheduledSequence], logits: Tensor, memory: UploadMemory
    ) -> RowMasks:
        """Queues the upload of the masks of a planned step. At least one sequence has a mask.

        Args:
            memory: see `of_trees`.
        """
        starts = itertools.accumulate((1 + len(entry.tree) for entry in drawn), initial=0)
        masked = [
            (entry, start)
            for entry, start in zip(drawn, starts, strict=False)
            if entry.sequence.is_masked
        ]
        trees = [(entry.sequence, entry.tree) for entry, _ in masked]
        masks = self.of_trees(trees, logits.shape[-1], memory)
        own = [start + row for entry, start in masked for row in range(1 + len(entry.tree))]
        rows, may_draw = np.array(own, np.int64), np.ones(len(logits), np.bool_)
        may_draw[rows] = masks.is_open
        return RowMasks(uploaded_numbers(own, logits.device), masks.words, may_draw)

    def of_trees(
        self, trees: SequenceOf[tuple[Sequence, TokenTree]], vocab_size: int, memory: UploadMemory
    ) -> TreeMasks:
        """Queues the upload of the masks of each sequence's tree, by grammar and rules.

        Args:
            memory: where the masks are written; its last upload has run, or the host waits for it.
        """
        *starts, num_rows = itertools.accumulate((1 + len(tree) for _, tree in trees), initial=0)
        words = memory.array((num_rows, num_mask_words(vocab_size)))
        matched: list[MaskedTree] = []
        for (sequence, tree), start in zip(trees, starts, strict=True):
            if sequence.matcher is None:
                words[start : start + 1 + len(tree)] = ALL_TOKENS
            else:
                matched.append(MaskedTree(sequence.matcher, tree, start))
        self._executor.fill(matched, words)
        for (sequence, tree), start in zip(trees, starts, strict=True):
            if sequence.rules is not None:
                _apply_rules(sequence.rules, tree, words[start : start + 1 + len(tree)])
        is_open: NDArray[np.bool_] = np.any(words, axis=1)
        words[~is_open] = ALL_TOKENS
        return TreeMasks(memory.uploaded(words), is_open)


def _apply_rules(rules: TokenRules, tree: TokenTree, masks: Masks) -> None:
    """Removes the tokens that rules forbid from masks, unless a row would have none left."""
    words = masks.view(np.uint32)
    for row, path in zip(words, row_paths(tree), strict=True):
        kept, forced = row.copy(), rules.forced_after(path)
        if forced is not None and _allows(row, forced):
            kept[:] = 0
            kept[forced // WORD_BITS] = 1 << forced % WORD_BITS
        else:
            for token_id in rules.banned_after(path):
                if _allows(kept, token_id):
                    kept[token_id // WORD_BITS] ^= np.uint32(1 << token_id % WORD_BITS)
        if kept.any():
            row[:] = kept


def _allows(row: NDArray[np.uint32], token_id: int) -> bool:
    word, bit = divmod(token_id, WORD_BITS)
    return word < len(row) and bool(row[word] >> np.uint32(bit) & np.uint32(1))
