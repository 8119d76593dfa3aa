"""Trees from text that a client predicts to recur in the output, as in an edit. No torch.

While the output follows the prediction, the next predicted tokens are its tree. When the output
leaves the prediction, its position there is searched for: next to an inserted, replaced or deleted
token, and wherever the last tokens of the output occur.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from shared.tokens import EMPTY_TREE, TokenTree

_LENGTHS = ((8, 32), (0, 16))
"""Pairs: from so many predicted tokens in a row on, a tree has so many levels."""
_SIDE_LENGTH = 8
_MAX_POSITIONS = 3
_MATCH_LENGTHS = (8, 4, 2)
"""Numbers of last output tokens that are searched for, in this order."""
_MAX_REPLACED = 3
_MAX_DELETED = 32
_MAX_MISMATCHED = 64
"""After more mismatched tokens in a row, drafts take over for good."""
_ITEM_BYTES = array("i").itemsize


class Prediction:
    """Follows one output through its prediction. Owned by the engine thread."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = tuple(token_ids)
        self._bytes = array("i", self._tokens).tobytes()
        self._tail: deque[int] = deque(maxlen=_MATCH_LENGTHS[0])
        # Likely positions of the output in the prediction, the likeliest first; none if unknown.
        self._positions = [0]
        # Where the output left the prediction, and how many tokens have mismatched since.
        self._left_at = 0
        self._num_mismatched = 0
        self._num_matched = 0

    @property
    def is_over(self) -> bool:
        """Whether the prediction is of no more use."""
        return self._num_mismatched > _MAX_MISMATCHED

    def advance(self, token_id: int) -> None:
        """Takes a committed token."""
        self._tail.append(token_id)
        positions = self._positions or self._search()
        kept = [start + 1 for start in positions if self._tokens[start : start + 1] == (token_id,)]
        if kept:
            self._num_matched, self._num_mismatched = self._num_matched + 1, 0
        else:
            if not self._num_mismatched:
                self._left_at = positions[0] if positions else len(self._tokens)
            self._num_matched, self._num_mismatched = 0, self._num_mismatched + 1
        self._positions = [position for position in kept if position < len(self._tokens)]

    def tree(self) -> TokenTree:
        """Returns the tree of likely next tokens, perhaps empty."""
        if not self._positions:
            self._positions = self._search()
        length = next(length for least, length in _LENGTHS if self._num_matched >= least)
        chains = [
            self._tokens[position : position + (_SIDE_LENGTH if rank else length)]
            for rank, position in enumerate(self._positions)
        ]
        return _merged(chains) if chains else EMPTY_TREE

    def _search(self) -> list[int]:
        """Returns likely positions of an output that has left the prediction."""
        positions = [*self._at_last_tokens(), *self._near_edit()]
        inside = [position for position in dict.fromkeys(positions) if position < len(self._tokens)]
        return inside[:_MAX_POSITIONS]

    def _near_edit(self) -> Iterator[int]:
        """Yields the positions after a small edit: tokens replaced, deleted, or inserted."""
        if not 0 < self._num_mismatched <= _MAX_REPLACED:
            return
        yield self._left_at + self._num_mismatched
        if self._num_mismatched == 1:
            deleted = self._tokens[self._left_at + 1 : self._left_at + _MAX_DELETED]
            if self._tail[-1] in deleted:
                yield self._left_at + 2 + deleted.index(self._tail[-1])
            yield self._left_at

    def _at_last_tokens(self) -> Iterator[int]:
        """Yields the position behind the longest match of the last output tokens: behind the next
        occurrence, else behind the first."""
        tail = tuple(self._tail)
        for length in _MATCH_LENGTHS:
            if len(tail) >= length:
                start = self._find(tail[-length:], self._left_at)
                start = self._find(tail[-length:], 0) if start is None else start
                if start is not None:
                    yield start + length
                    return

    def _find(self, token_ids: Sequence[int], start: int) -> int | None:
        wanted, offset = array("i", token_ids).tobytes(), start * _ITEM_BYTES
        while (offset := self._bytes.find(wanted, offset)) >= 0:
            if offset % _ITEM_BYTES == 0:
                return offset // _ITEM_BYTES
            offset += 1
        return None


def _merged(chains: Sequence[Sequence[int]]) -> TokenTree:
    """Returns the tree of all chains; chains share the nodes of equal prefixes."""
    nodes: dict[tuple[int | None, int], int] = {}
    for chain in chains:
        parent: int | None = None
        for token_id in chain:
            parent = nodes.setdefault((parent, token_id), len(nodes))
    return TokenTree(tuple(token_id for _, token_id in nodes), tuple(parent for parent, _ in nodes))
