"""The tokens that grammars allow at each row of a step: committed token and tree nodes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.target.grammars.matcher import GrammarMatcher, Mask
from services.target.step_plan import ScheduledSequence
from shared.speculation.distributions import num_mask_words
from shared.speculation.verify import AcceptedPath
from shared.tokens import TokenTree

_NUM_THREADS = 4
_ALL = -1  # every bit of a word


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of a step's rows.

    Attributes:
        bits: `[R, W]` int32 on the device, see `masked_logits`.
        may_draw: False for the rows of nodes that their grammar forbids, and beyond a bound of
            the matcher. A token drawn there means nothing.
    """

    bits: Tensor
    may_draw: tuple[bool, ...]

    def cut(self, path: AcceptedPath, tree: TokenTree, first_row: int) -> AcceptedPath:
        """Ends a path at the first node whose row may not draw: the node is the bonus then."""
        for place, node in enumerate(path.node_indices):
            if not self.may_draw[first_row + 1 + node]:
                return AcceptedPath(path.node_indices[:place], tree.token_ids[node])
        return path


class TokenMasks:
    """Computes masks on the host, in the shadow of the forward where that is on a GPU.

    The matchers of several sequences run side by side: llguidance lets go of the interpreter.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "masks")

    def of(self, drawn: Sequence[ScheduledSequence], logits: Tensor) -> RowMasks | None:
        """Returns the masks of all rows; None when no sequence has a grammar."""
        constrained: list[tuple[int, GrammarMatcher, TokenTree]] = []
        num_rows = 0
        for entry in drawn:
            if entry.sequence.matcher is not None:
                constrained.append((num_rows, entry.sequence.matcher, entry.tree))
            num_rows += 1 + len(entry.tree)
        if not constrained:
            return None
        _, matchers, trees = zip(*constrained, strict=True)
        # One sequence alone is faster without a change of threads.
        run = map if len(constrained) == 1 else self._threads.map
        found = run(GrammarMatcher.tree_masks, matchers, trees)
        bits = _all_allowed(num_rows, num_mask_words(logits.shape[1]), logits.device)
        may_draw = [True] * num_rows
        for (first_row, _, _), masks in zip(constrained, found, strict=True):
            _write(bits, may_draw, first_row, masks)
        return RowMasks(bits.to(logits.device, non_blocking=True), tuple(may_draw))


def _all_allowed(num_rows: int, num_words: int, device: torch.device) -> Tensor:
    is_pinned = device.type == "cuda"
    return torch.full((num_rows, num_words), _ALL, dtype=torch.int32, pin_memory=is_pinned)


def _write(
    bits: Tensor, may_draw: list[bool], first_row: int, masks: Sequence[Mask | None]
) -> None:
    rows = bits.numpy().view(np.uint8)
    for row, mask in enumerate(masks, start=first_row):
        if mask is None:
            may_draw[row] = False
            continue
        # Rows of the model's output beyond the tokenizer's tokens are never allowed.
        rows[row] = 0
        # llguidance adds a word for its own use where the vocabulary fills the last one.
        num_bytes = min(len(mask), rows.shape[1])
        rows[row, :num_bytes] = np.frombuffer(mask, np.uint8, num_bytes)
