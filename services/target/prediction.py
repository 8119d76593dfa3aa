"""Trees from text that a client expects the output to hold in long runs, as in an edit. No torch.

While the output goes as predicted, the next predicted tokens are its tree. Where it leaves the
text, it is looked for again: behind a token that was put in, replaced or left out, and wherever the
last tokens of the output occur.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from shared.tokens import EMPTY_TREE, TokenTree

_LENGTHS = ((8, 32), (0, 16))
"""Tokens that went as predicted in a row, from which on a tree has that many levels."""
_SIDE_LENGTH = 8
_MAX_PLACES = 3
_MATCHED = (8, 4, 2)
"""Last tokens of the output that are looked for, the most first."""
_MAX_REPLACED = 3
_MAX_LEFT_OUT = 32
_MOST_IDLE = 64
"""Tokens in a row that do not go as predicted, after which drafts take over for good."""
_ITEM_BYTES = array("i").itemsize


class Prediction:
    """Follows one output through its predicted text. Owned by the engine thread."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = tuple(token_ids)
        self._bytes = array("i", self._tokens).tobytes()
        self._tail: deque[int] = deque(maxlen=_MATCHED[0])
        # Where in the text the output may be; the likeliest first, none where it is lost.
        self._places = [0]
        self._lost_at = 0
        self._num_lost = 0
        self._run = 0

    @property
    def is_over(self) -> bool:
        """Whether the text is of no more use."""
        return self._num_lost > _MOST_IDLE

    def advance(self, token_id: int) -> None:
        """Takes a committed token."""
        self._tail.append(token_id)
        places = self._places or self._found()
        kept = [place + 1 for place in places if self._token(place) == token_id]
        if kept:
            self._run, self._num_lost = self._run + 1, 0
        else:
            if not self._num_lost:
                self._lost_at = places[0] if places else len(self._tokens)
            self._run, self._num_lost = 0, self._num_lost + 1
        self._places = [place for place in kept if place < len(self._tokens)]

    def tree(self) -> TokenTree:
        """Returns what may come next, perhaps nothing."""
        if not self._places:
            self._places = self._found()
        length = next(length for run, length in _LENGTHS if self._run >= run)
        chains = [
            self._tokens[place : place + (_SIDE_LENGTH if rank else length)]
            for rank, place in enumerate(self._places)
        ]
        return _merged(chains) if chains else EMPTY_TREE

    def _found(self) -> list[int]:
        """Returns where a lost output may be."""
        places = [*self._matching(), *self._near()]
        inside = [place for place in dict.fromkeys(places) if place < len(self._tokens)]
        return inside[:_MAX_PLACES]

    def _near(self) -> Iterator[int]:
        """Yields positions after a small edit: tokens replaced, left out, or inserted."""
        if not 0 < self._num_lost <= _MAX_REPLACED:
            return
        yield self._lost_at + self._num_lost
        if self._num_lost == 1:
            left_out = self._tokens[self._lost_at + 1 : self._lost_at + _MAX_LEFT_OUT]
            if self._tail[-1] in left_out:
                yield self._lost_at + 2 + left_out.index(self._tail[-1])
            yield self._lost_at

    def _matching(self) -> Iterator[int]:
        """Behind the most of the last tokens that occur: the next time, else the first time."""
        tail = tuple(self._tail)
        for length in _MATCHED:
            if len(tail) >= length:
                found = self._find(tail[-length:], self._lost_at)
                found = self._find(tail[-length:], 0) if found is None else found
                if found is not None:
                    yield found + length
                    return

    def _find(self, token_ids: Sequence[int], start: int) -> int | None:
        wanted, offset = array("i", token_ids).tobytes(), start * _ITEM_BYTES
        while (offset := self._bytes.find(wanted, offset)) >= 0:
            if offset % _ITEM_BYTES == 0:
                return offset // _ITEM_BYTES
            offset += 1
        return None

    def _token(self, place: int) -> int | None:
        return self._tokens[place] if place < len(self._tokens) else None


def _merged(chains: Sequence[Sequence[int]]) -> TokenTree:
    """Returns the tree of all chains; equal beginnings are there once."""
    nodes: dict[tuple[int | None, int], int] = {}
    for chain in chains:
        parent: int | None = None
        for token_id in chain:
            parent = nodes.setdefault((parent, token_id), len(nodes))
    return TokenTree(tuple(token_id for _, token_id in nodes), tuple(parent for parent, _ in nodes))
