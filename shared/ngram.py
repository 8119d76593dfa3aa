"""N-gram index over many texts: finds what followed the same tokens before. No torch.

All texts lie in one ring of pages. For a few lengths, a hash table says where the last so many
tokens were seen last, once for each token that followed. So the texts of a whole step are taken in
and looked up by a few operations on arrays.

Trees grow out of it. Where the end of a text was seen before, a *chain* begins: the tokens that
followed there. By the rule of succession, a match of n tokens goes on for d more with probability
n / (n + d). The nodes of all chains that are the most probable make the tree."""

from __future__ import annotations

import enum
import functools
import hashlib
import heapq
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.tokens import CHAIN_PARENTS, EMPTY_TREE, TokenTree, TreeShape

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

PAGE = 64
"""Tokens of a page. A page holds tokens of one text, whose next page is known."""
WAYS = 16
"""Continuations of an n-gram: each token has one place of so many, by its hash."""
MAX_TOKENS = 16384
"""Read at once."""
NEAR_END = 16
"""Tokens of a text that may be too few to draft from."""
_NONE = -1
"""In place of a token: there a text ends."""
_END = 1 << 32
"""Of the positions. Before it is reached all is forgotten, once in hours of full load."""
_LOWER = _END - 1
_MOST_COUNTED = 4095

_MULTIPLIER, _BASE, _TAG, _STEP = (
    np.uint64(each)
    for each in (0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xC2B2AE3D27D4EB4F, 0xBF58476D1CE4E5B9)
)
_HALF, _WAY_SHIFT = np.uint64(32), np.uint64(64 - WAYS.bit_length() + 1)
_UPPER = np.uint64(_LOWER << 32)
_LOGS = tuple(math.log(n / (n + 1)) if n else 0.0 for n in range(2 * PAGE + 1))


def _powers(base: int) -> Words:
    """Returns base to the 0, 1, 2, …, modulo 2^64."""
    factors = np.full(MAX_TOKENS + 1, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


_POWERS, _INVERSES = _powers(int(_BASE)), _powers(pow(int(_BASE), -1, 1 << 64))


class MatchType(enum.Enum):
    """Which continuations of an n-gram come first: the most recent, or the most frequent."""

    BFS = "BFS"
    PROB = "PROB"


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """Size and lookup options of the index.

    Attributes:
        max_trie_depth: longest n-gram, context and continuation together; at most `PAGE`.
        capacity: most n-grams. Each takes 9 bytes, 2 more with PROB.
        min_breadth: most continuations of the longest context; those of the shortest are the tree
            shape's `topk`. What is beyond counts as a continuation of a shorter one.
        min_match: tokens of context that must have occurred before to draft from.
    """

    match_type: MatchType = MatchType.BFS
    max_trie_depth: int = 18
    capacity: int = 10_000_000
    min_breadth: int = 1
    min_match: int = 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of context that are looked up, the most first: each half of the one before. How
        long a match is matters the less the longer it is."""
        length, found = self.max_trie_depth - 1, {self.min_match}
        while length > self.min_match:
            found.add(length)
            length //= 2
        return tuple(sorted(found, reverse=True))

    def breadths(self, topk: int) -> tuple[int, ...]:
        """Returns the most continuations for each of the lengths: they rise linearly."""
        low, span = min(self.min_breadth, topk), max(self.max_trie_depth - 2, 1)
        shares = ((length - 1) / span for length in self.lengths)
        return tuple(max(low, round(topk - (topk - low) * share)) for share in shares)


@dataclass(slots=True)
class Cursor:
    """How far a text is taken in.

    Attributes:
        seed: of its hashes. Texts of one salt share one, and find each other only.
        num_seen: tokens taken in.
        end: position behind the last of them.
    """

    seed: int = 0
    num_seen: int = 0
    end: int = 0

    @classmethod
    def of(cls, salt: str = "") -> Cursor:
        """Returns the cursor of a text that begins."""
        digest = hashlib.blake2b(salt.encode(), digest_size=8).digest() if salt else b""
        return cls(int.from_bytes(digest) >> 1)


Text = tuple[Cursor, Sequence[int]]
"""A cursor, and all tokens of its text."""


@dataclass(frozen=True, slots=True, eq=False)
class _Keys:
    """Hashes of what is before some places of texts, for each of the lengths.

    Attributes:
        buckets: `[P, L]`, rows of the table.
        tags: `[P, L]`, more of the hash, in the upper half of a word.
        are_whole: `[P, L]`, whether so many tokens are before the place; None where all are.
    """

    buckets: Integers
    tags: Words
    are_whole: Flags | None

    def of(self, places: slice) -> _Keys:
        """Returns those of some places."""
        are_whole = None if self.are_whole is None else self.are_whole[places]
        return _Keys(self.buckets[places], self.tags[places], are_whole)


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """Texts that are read together, each from a few tokens before what is new.

    Attributes:
        keys: of the places before each new token, then of the end of each text.
        token_ids, hashes: `[T]`, of the new tokens.
        num_after: `[T]`, tokens of the text that follow each of them.
    """

    keys: _Keys
    token_ids: Integers
    hashes: Words
    num_after: Integers

    @property
    def before(self) -> _Keys:
        return self.keys.of(slice(len(self.token_ids)))

    @property
    def ends(self) -> _Keys:
        return self.keys.of(slice(len(self.token_ids), None))


class NgramIndex:
    """N-grams of many texts, and trees grown from them.

    A *position* counts the tokens that there was room for since the start; the ring holds the last
    of them. An entry of the table is a position in the lower half of a word, and in the upper one
    hash bits of the tokens before it, so one in four billion look-ups takes an n-gram for another.
    Of n-grams with the same place in the table, and of pages when the ring is full, the older make
    way. Of the same n-gram the last place is known that is not near the end of a text, if any.
    """

    def __init__(self, options: NgramOptions) -> None:
        longest = options.max_trie_depth - 1
        assert 1 <= options.min_match <= longest < PAGE, "a prediction needs a token of context"
        self._options = options
        self._lengths = np.array(options.lengths)
        self._misses = 1 / (self._lengths + 1)
        self._table = np.zeros((max(options.capacity // WAYS, 1), WAYS), np.uint64)
        self._entries = self._table.reshape(-1)
        is_counted = options.match_type is MatchType.PROB
        self._counts = np.zeros(self._entries.size, np.int16) if is_counted else None
        self._num_pages = max(options.capacity // (len(self._lengths) * PAGE), 2)
        # The last page stays empty: it follows those that no other one follows.
        self._pages = np.full((self._num_pages + 1, PAGE), _NONE, np.int32)
        self._tokens = self._pages.reshape(-1)
        self._next_pages = np.full(self._num_pages + 1, self._num_pages)
        self._size = self._num_pages * PAGE
        self._first = self._size + PAGE  # so that an empty entry is older than the ring
        self._head = self._first

    @property
    def num_tokens(self) -> int:
        """Tokens held, with the room behind the ends of texts."""
        return min(self._head - self._first, self._size)

    @property
    def num_forgotten(self) -> int:
        """Tokens that made way for others."""
        return self._head - self._first - self.num_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens at the end of a text that its tree depends on."""
        return self._options.max_trie_depth - 1

    def take_in(self, texts: Iterable[Text]) -> None:
        """Takes in what is new of texts."""
        for batch in self._batches(texts):
            self._take_in(batch)

    def grow(self, texts: Iterable[Text], shape: TreeShape) -> list[TokenTree]:
        """Takes in what is new of texts; returns a tree of continuations of each, perhaps empty."""
        trees: list[TokenTree] = []
        for batch in self._batches(texts):
            trees += self._trees(self._take_in(batch).ends, shape)
        return trees

    def grow_ahead(
        self, seed: int, texts: Iterable[Sequence[int]], shape: TreeShape
    ) -> list[TokenTree]:
        """Returns trees of texts that are only supposed: nothing is taken in.

        Args:
            seed: of their cursor.
            texts: their last `context_tokens`, or all there are.
        """
        trees: list[TokenTree] = []
        for batch in self._batches((Cursor(seed, len(ids)), ids) for ids in texts):
            trees += self._trees(self._read(batch).ends, shape)
        return trees

    def check(self) -> None:
        """Asserts that every entry points to a token that is in its place."""
        found = (self._entries & np.uint64(_LOWER)).view(np.int64)
        slots = (found >= self._oldest).nonzero()[0]
        assert (found < self._head).all()
        token_ids = self._tokens[found[slots] % self._size].astype(np.int64)
        assert (token_ids >= 0).all()
        assert (_ways(_scrambled(token_ids.view(np.uint64))) == slots % WAYS).all()
        assert (self._pages[-1] == _NONE).all()

    @property
    def _oldest(self) -> int:
        """The first position that the ring holds."""
        return self._head - self._size

    def _batches(self, texts: Iterable[Text]) -> Iterator[list[Text]]:
        """Yields texts that can be read together. Of one that is too long the beginning is taken in
        before."""
        batch, room, most = list[Text](), MAX_TOKENS, MAX_TOKENS - PAGE
        for cursor, token_ids in texts:
            while len(token_ids) - cursor.num_seen > most:
                self._take_in([(cursor, token_ids[: cursor.num_seen + most])])
            num_tokens = len(token_ids) - cursor.num_seen + PAGE
            if num_tokens > room:
                yield batch
                batch, room = [], MAX_TOKENS
            batch.append((cursor, token_ids))
            room -= num_tokens
        if batch:
            yield batch

    def _take_in(self, texts: Sequence[Text]) -> _Reading:
        reading = self._read(texts)
        if len(reading.token_ids):
            positions = self._place(texts)
            # A ring that is too small for all of them holds the last ones.
            held = slice(None) if positions.min() >= self._oldest else positions >= self._oldest
            self._tokens[positions[held] % self._size] = reading.token_ids[held]
            self._enter(reading, positions)
        return reading

    def _read(self, texts: Sequence[Text]) -> _Reading:
        """Hashes what is before each new token and before the end of each text.

        A hash is a polynomial in the tokens modulo 2^64. That of a window is the difference of two
        prefix sums.
        """
        longest = self.context_tokens
        read, rows, seeds, is_short = array("q", (0,)), array("q"), list[int](), False
        for cursor, token_ids in texts:
            num_seen = cursor.num_seen
            start = num_seen - longest
            if start < 0:
                start, is_short = 0, True
            seeds.append(cursor.seed)
            rows.append(len(token_ids) - num_seen)
            read.extend(token_ids[start:])
            rows.append(len(read) - 1)
        num_new, ends = np.frombuffer(rows, np.int64).reshape(-1, 2).T
        new = _ranges(ends - num_new, num_new)
        stops = np.concatenate((new, ends))

        # Before all is one token that no window has.
        tokens = np.frombuffer(read, np.int64)
        hashes = _scrambled(tokens.view(np.uint64))
        sums = (hashes * _INVERSES[: len(hashes)]).cumsum()
        begins = stops[:, None] - self._lengths
        are_whole = None
        if is_short:
            firsts = np.concatenate(([0], ends[:-1]))
            are_whole = begins >= np.concatenate((firsts.repeat(num_new), firsts))[:, None]
            np.maximum(begins, 0, out=begins)
        words = (sums[stops, None] - sums[begins]) * _POWERS[stops, None]
        if any(seeds):
            own = np.array(seeds, np.uint64)
            words += np.concatenate((own.repeat(num_new), own))[:, None]
        buckets = (words * _MULTIPLIER >> _HALF) * np.uint64(len(self._table)) >> _HALF
        keys = _Keys(buckets.view(np.int64), words * _TAG & _UPPER, are_whole)
        new += 1
        return _Reading(keys, tokens[new], hashes[new], ends.repeat(num_new) - new)

    def _place(self, texts: Iterable[Text]) -> Integers:
        """Returns positions for the new tokens of texts, and moves the cursors behind them."""
        if self._head > _END - 4 * MAX_TOKENS:
            self._table.fill(0)
            self._head = self._first
        runs = array("q")
        for cursor, token_ids in texts:
            num_new = len(token_ids) - cursor.num_seen
            cursor.num_seen += num_new
            end, head = cursor.end, self._head
            room = -end % PAGE if head - self._size < end <= head else 0
            if num_new <= room:
                runs.extend((end, num_new))
                cursor.end = end + num_new
            else:
                cursor.end = end + room
                start = self._turn_over(cursor, num_new - room)
                runs.extend((end, room, start, num_new - room))
        starts, counts = np.frombuffer(runs, np.int64).reshape(-1, 2).T
        return _ranges(starts, counts)

    def _turn_over(self, cursor: Cursor, num_tokens: int) -> int:
        """Gives a text new pages for so many tokens; returns the position of the first."""
        start, before = self._head, cursor.end
        self._head += -(-num_tokens // PAGE) * PAGE
        cursor.end = start + num_tokens
        pages = np.arange(start // PAGE, self._head // PAGE) % self._num_pages
        self._pages[pages] = _NONE
        self._next_pages[pages[:-1]] = pages[1:]
        self._next_pages[pages[-1]] = self._num_pages
        if self._oldest < before <= start:
            self._next_pages[(before - 1) // PAGE % self._num_pages] = pages[0]
        return start

    def _enter(self, reading: _Reading, positions: Integers) -> None:
        """Notes in the table which tokens follow what is before them."""
        keys = reading.before
        slots = keys.buckets * WAYS + _ways(reading.hashes)[:, None]
        entries = keys.tags | positions.view(np.uint64)[:, None]
        is_new = np.ones(slots.shape, np.bool_) if keys.are_whole is None else keys.are_whole
        if self._counts is not None:
            self._count(slots[is_new], entries[is_new])
        # A text that grows has little to tell near its end: what is known of others stays.
        is_near = reading.num_after < NEAR_END
        near = slice(None) if is_near.all() else is_near.nonzero()[0]
        known = self._entries[slots[near]]
        places = (known & np.uint64(_LOWER)).view(np.int64)
        is_same = (known ^ entries[near] < _END) & (places >= self._oldest)
        is_same &= self._tokens[places % self._size] == reading.token_ids[near, None]
        is_new[near] &= ~is_same
        self._entries[slots[is_new]] = entries[is_new]

    def _count(self, slots: Integers, entries: Words) -> None:
        """Counts n-grams once more, or anew where others were."""
        assert self._counts is not None
        self._counts[slots[self._entries[slots] ^ entries >= _END]] = 0
        np.add.at(self._counts, slots, np.int16(1))
        self._counts[slots] = np.minimum(self._counts[slots], _MOST_COUNTED)

    def _trees(self, keys: _Keys, shape: TreeShape) -> list[TokenTree]:
        """Returns the trees of texts, by the keys of their ends."""
        trees = [EMPTY_TREE] * len(keys.buckets)
        owners, lengths, scores, positions = self._matches(keys, shape.topk)
        if not len(owners):
            return trees
        most, depth = shape.max_node_count, min(shape.num_steps, shape.max_node_count, PAGE)
        is_first = np.concatenate(([True], owners[1:] != owners[:-1]))
        first = is_first.nonzero()[0]
        chains = self._chains(positions[first], depth)
        # Where the first chain fills the tree, another one must promise more than its last node.
        bounds = np.zeros(len(trees))
        if depth == most:
            lasts = scores[first] * (lengths[first] + 1) / (lengths[first] + most)
            bounds[owners[first]] = np.where(chains[:, -1] != _NONE, lasts, 0.0)
        others = (~is_first & (scores > bounds[owners])).nonzero()[0]
        if len(others):
            first = np.concatenate((first, others))
            chains = np.concatenate((chains, self._chains(positions[others], depth)))
        found: dict[int, list[_Chain]] = {}
        columns = (each.tolist() for each in (owners[first], lengths[first], scores[first], chains))
        for owner, length, score, tokens in zip(*columns, strict=True):
            found.setdefault(owner, []).append((length, score, tokens))
        for owner, own in found.items():
            trees[owner] = _merged(own, shape) if len(own) > 1 else _chain(*own[0])
        return trees

    def _matches(
        self, keys: _Keys, topk: int
    ) -> tuple[Integers, Integers, NDArray[np.float64], Integers]:
        """Returns where the ends of texts were seen before, by text and the longest match first.

        Returns:
            Of each match, the number of the text, the length, the probability of the token that
            followed, 0 for one too many, and its position.
        """
        found = self._table[keys.buckets]
        found ^= keys.tags[:, :, None]
        if keys.are_whole is not None:
            found[~keys.are_whole] = _UPPER
        is_seen = (found - np.uint64(self._oldest)) < self._size
        # A longer match has found it already.
        is_seen[:, 1:] &= found[:, 1:] != found[:, :-1]
        slots = is_seen.reshape(-1).nonzero()[0]
        groups = slots // WAYS
        order = (groups << 44) + _LOWER - found.reshape(-1)[slots].view(np.int64)
        if self._counts is not None:
            places = keys.buckets.reshape(-1)[groups] * WAYS + slots % WAYS
            order += _MOST_COUNTED - self._counts[places].astype(np.int64) << 32
        order.sort()
        groups = order >> 44
        sizes = np.bincount(groups, minlength=1)
        ranks = np.arange(len(groups)) - groups.searchsorted(groups)
        owners, kinds = np.divmod(groups, len(self._lengths))
        lengths, shares = _counted(self._options, topk)
        # Shorter matches are for what does not follow the longer ones.
        left = np.where(is_seen.any(2), self._misses, 1.0).cumprod(1).reshape(-1)
        scores = left[groups] * shares[kinds, ranks]
        if self._counts is None:
            scores /= sizes[groups]
        else:
            weights = _MOST_COUNTED - (order >> 32 & _MOST_COUNTED)
            scores *= weights / np.bincount(groups, weights, minlength=1)[groups]
        return owners, lengths[kinds, ranks], scores, _LOWER - (order & _LOWER)

    def _chains(self, positions: Integers, depth: int) -> NDArray[np.int32]:
        """Returns `[C, depth]`, the tokens from positions on; -1 where their texts end."""
        pages, offsets = np.divmod(positions % self._size, PAGE)
        places = offsets[:, None] + np.arange(depth)
        pages = np.where(places < PAGE, pages[:, None], self._next_pages[pages, None])
        return self._tokens[pages * PAGE + places % PAGE]


def _scrambled(words: Words) -> Words:
    words = (words + _STEP) * _MULTIPLIER
    words ^= words >> _HALF
    words *= _STEP
    words ^= words >> _HALF
    return words


def _ways(hashes: Words) -> Integers:
    ways: Integers = (hashes >> _WAY_SHIFT).view(np.int64)
    return ways


def _ranges(starts: Integers, counts: Integers) -> Integers:
    """Returns the numbers from each start on, as many as its count."""
    if len(counts) == 1:
        return np.arange(int(starts[0]), int(starts[0] + counts[0]))
    ends = counts.cumsum()
    ranges: Integers = np.arange(ends[-1]) + (starts + counts - ends).repeat(counts)
    return ranges


@functools.lru_cache(16)
def _counted(options: NgramOptions, topk: int) -> tuple[Integers, NDArray[np.float64]]:
    """Returns `[L, WAYS]`, the length of match that the continuation of a rank counts as: the first
    that has the breadth for it, 0 for none. And the probability that goes with it, divided by that
    of a miss of the match."""
    lengths = np.zeros((len(options.lengths), WAYS), np.int64)
    for kind, rank in np.ndindex(*lengths.shape):
        pairs = zip(options.lengths[kind:], options.breadths(topk)[kind:], strict=True)
        lengths[kind, rank] = next((length for length, most in pairs if rank < most), 0)
    return lengths, lengths / (lengths + 1) * (np.array(options.lengths)[:, None] + 1)


_Chain = tuple[int, float, list[int]]
"""Length of the match, probability of the first token, and the tokens, with -1 at the end."""


def _chain(length: int, score: float, token_ids: list[int]) -> TokenTree:
    if token_ids[-1] == _NONE:
        token_ids = token_ids[: token_ids.index(_NONE)]
    count = len(token_ids)
    log_probs = (math.log(score), *_LOGS[length + 1 : length + count])
    return TokenTree(tuple(token_ids), CHAIN_PARENTS[:count], log_probs)


def _merged(chains: Sequence[_Chain], shape: TreeShape) -> TokenTree:
    """Returns the most probable nodes of several chains as a tree."""
    token_ids, parents, log_probs = list[int](), list[int | None](), list[float]()
    most, topk = shape.max_node_count, shape.topk
    nodes: dict[tuple[int | None, int], int] = {}
    num_children: dict[int | None, int] = {}
    # Entries: cost, number of the chain, the node that it has come to, and how deep that is.
    heap: list[tuple[float, int, int | None, int]] = [
        (-score, number, None, 0) for number, (_, score, _) in enumerate(chains)
    ]
    heapq.heapify(heap)
    while heap and len(token_ids) < most:
        cost, number, parent, depth = heapq.heappop(heap)
        length, _, tokens = chains[number]
        token = tokens[depth]
        if token == _NONE:
            continue
        node = nodes.get((parent, token))
        if node is None:
            rank = num_children.get(parent, 0)
            if rank == topk:
                continue
            num_children[parent] = rank + 1
            node = nodes[parent, token] = len(token_ids)
            token_ids.append(token)
            parents.append(parent)
            log_probs.append(_LOGS[length + depth] if depth else math.log(-cost))
        if depth + 1 < len(tokens):
            cost *= (length + depth + 1) / (length + depth + 2)
            heapq.heappush(heap, (cost, number, node, depth + 1))
    return TokenTree(tuple(token_ids), tuple(parents), tuple(log_probs))
