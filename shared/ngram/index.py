"""N-gram index over many texts: finds what followed the same tokens before. No torch.

One trie holds the n-grams of every text that was taken in. A *cursor* is where one text ends in
it; one that is led on over tokens that are only supposed counts nothing. Texts of one *salt* share
a trie of their own below the root.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from shared.ngram.tree import grow_by_frequency, grow_by_recency
from shared.ngram.trie import ROOT, NgramTrie
from shared.tokens import EMPTY_TREE, TokenTree, TreeShape


class MatchType(enum.Enum):
    """The order in which a tree is grown from the trie."""

    BFS = "BFS"
    PROB = "PROB"


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """Size and lookup options of the trie.

    Attributes:
        max_trie_depth: longest n-gram, context and continuation together.
        capacity: most trie nodes.
        min_breadth: fewest children of a node in BFS trees, at the longest context; the most are
            the tree shape's `topk`.
        min_match: tokens of context that must have occurred before to draft from.
    """

    match_type: MatchType = MatchType.BFS
    max_trie_depth: int = 18
    capacity: int = 10_000_000
    min_breadth: int = 1
    min_match: int = 1


@dataclass(slots=True)
class Cursor:
    """The position of a text's end in the trie.

    Attributes:
        nodes: element i is the node of the last i + 1 tokens taken in, None if it was evicted.
        num_seen: tokens taken in.
        num_evictions: the trie's count when `nodes` and `root` were valid.
        salt: the text's, as a path of the trie that no tokens have.
        root: where that path ends.
    """

    nodes: list[int | None] = field(default_factory=list)
    num_seen: int = 0
    num_evictions: int = 0
    salt: tuple[int, ...] = ()
    root: int = ROOT


class NgramIndex:
    """N-grams of many texts, and trees grown from them."""

    def __init__(self, options: NgramOptions) -> None:
        self._options = options
        self._trie = NgramTrie(max_depth=options.max_trie_depth, capacity=options.capacity)

    def __len__(self) -> int:
        """N-grams held."""
        return len(self._trie)

    @property
    def num_evictions(self) -> int:
        return self._trie.num_evictions

    def cursor(self, salt: str = "") -> Cursor:
        """Returns the cursor of a text that begins."""
        cursor = Cursor(salt=_salt_path(salt))
        self._find_root(cursor)
        return cursor

    def learn(self, token_ids: Sequence[int]) -> None:
        """Takes a whole text in."""
        self.take_in(self.cursor(), token_ids, len(token_ids))

    def take_in(self, cursor: Cursor, token_ids: Sequence[int], num_tokens: int) -> None:
        """Counts the n-grams that end at each of the next `num_tokens` tokens of a text."""
        for _ in range(num_tokens):
            self._refresh(cursor, token_ids)
            self._see(cursor, token_ids[cursor.num_seen])
        self._refresh(cursor, token_ids)

    def grow(self, cursor: Cursor, token_ids: Sequence[int], shape: TreeShape) -> TokenTree:
        """Returns a tree of continuations of the cursor's last tokens, perhaps empty.

        Args:
            token_ids: the cursor's text.
        """
        self._refresh(cursor, token_ids)
        return self.grow_ahead(cursor, shape)

    def is_current(self, cursor: Cursor) -> bool:
        """Whether no eviction has touched the cursor since its text was last taken in."""
        return cursor.num_evictions == self._trie.num_evictions

    def supposed(self, cursor: Cursor, token: int) -> Cursor:
        """Returns the cursor of the same text with one more token, which is not counted.

        It is good until the trie changes.
        """
        trie = self._trie
        above: Iterable[int | None] = (cursor.root, *cursor.nodes)
        nodes = [None if node is None else trie.child(node, token) for node in above]
        return replace(cursor, nodes=nodes[: trie.max_depth - 1], num_seen=cursor.num_seen + 1)

    def grow_ahead(self, cursor: Cursor, shape: TreeShape) -> TokenTree:
        """`grow` for a cursor that nothing was taken in after."""
        anchors = [(node, index + 1) for index, node in enumerate(cursor.nodes) if node is not None]
        anchors = anchors[self._options.min_match - 1 :]
        if not anchors:
            return EMPTY_TREE
        anchors.reverse()
        if self._options.match_type is MatchType.PROB:
            return grow_by_frequency(self._trie, anchors, shape)
        return grow_by_recency(self._trie, anchors, shape, min_breadth=self._options.min_breadth)

    def check(self) -> None:
        """Asserts the trie's invariants."""
        self._trie.check()

    def _see(self, cursor: Cursor, token: int) -> None:
        trie = self._trie
        extended: list[int | None] = [trie.see(cursor.root, token)]
        for node in cursor.nodes:
            # An eviction may have given the node to another n-gram; the next refresh repairs it.
            is_valid = node is not None and trie.num_evictions == cursor.num_evictions
            extended.append(trie.see(node, token) if node is not None and is_valid else None)
        # N-grams of the full depth have no continuation, so they are no anchors.
        cursor.nodes = extended[: trie.max_depth - 1]
        cursor.num_seen += 1

    def _refresh(self, cursor: Cursor, token_ids: Sequence[int]) -> None:
        """Finds the cursor's nodes again after evictions."""
        if cursor.num_evictions == self._trie.num_evictions:
            return
        self._find_root(cursor)
        end = cursor.num_seen
        cursor.nodes = [
            self._trie.find(token_ids[end - length : end], cursor.root)
            for length in range(1, min(end, self._trie.max_depth - 1) + 1)
        ]

    def _find_root(self, cursor: Cursor) -> None:
        """Makes the path of the salt again, which an eviction may have broken."""
        cursor.root = ROOT
        for part in cursor.salt:
            cursor.root = self._trie.see(cursor.root, part)
        cursor.num_evictions = self._trie.num_evictions


def _salt_path(salt: str) -> tuple[int, ...]:
    """Returns numbers that are no token ids: 93 bits of a digest, negative."""
    if not salt:
        return ()
    digest = hashlib.blake2b(salt.encode(), digest_size=12).digest()
    return tuple(-1 - (int.from_bytes(digest[i : i + 4]) >> 1) for i in (0, 4, 8))
