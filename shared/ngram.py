"""N-gram index over many texts: finds the tokens that followed the same context before. No torch.

All texts lie in one ring of pages. A hash table maps contexts of a few lengths to the positions
where they last occurred, one for each token that followed. So all texts of a step are added and
looked up by a few array operations.

Trees are made of the matches. Where the end of a text occurred before, a *chain* begins: the tokens
that followed there. By the rule of succession, a match of n tokens continues for d more tokens with
probability n / (n + d). The most probable nodes of all chains make the tree."""

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
"""Tokens per page. A page holds tokens of one text, and a link to the text's next page."""
WAYS = 16
"""Table entries per context; the hash of the continuation selects one of them."""
MAX_TOKENS = 16384
"""Most tokens that are hashed at once."""
NEAR_END = 16
"""Tokens at the end of a text that may be too few to draft from."""
_NONE = -1
"""A slot without a token, behind the end of a text."""
_END = 1 << 32
"""Upper bound of positions. The index is cleared before it is reached, after hours of full load."""
_LOWER = _END - 1
_MAX_COUNT = 4095

_MULTIPLIER, _BASE, _TAG, _STEP = (
    np.uint64(constant)
    for constant in (0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xC2B2AE3D27D4EB4F, 0xBF58476D1CE4E5B9)
)
_HALF, _WAY_SHIFT = np.uint64(32), np.uint64(64 - WAYS.bit_length() + 1)
_UPPER = np.uint64(_LOWER << 32)
_STEP_LOG_PROBS = tuple(math.log(n / (n + 1)) if n else 0.0 for n in range(2 * PAGE + 1))


def _powers(base: int) -> Words:
    """Returns the powers 0, 1, 2, … of the base, modulo 2^64."""
    factors = np.full(MAX_TOKENS + 1, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


_POWERS, _INVERSES = _powers(int(_BASE)), _powers(pow(int(_BASE), -1, 1 << 64))


class MatchType(enum.Enum):
    """Which continuations of a context come first: the most recent, or the most frequent."""

    BFS = "BFS"
    PROB = "PROB"


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """Size and lookup options of the index.

    Attributes:
        max_trie_depth: longest n-gram, context and continuation together; at most `PAGE`.
        capacity: most n-grams. Each takes 9 bytes, 2 more with PROB.
        min_breadth: most continuations of the longest context; of the shortest it is the tree
            shape's `topk`. Further ones count as continuations of a shorter context.
        min_match: tokens of context that must have occurred before to draft from them.
    """

    match_type: MatchType = MatchType.BFS
    max_trie_depth: int = 18
    capacity: int = 10_000_000
    min_breadth: int = 1
    min_match: int = 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of context that are looked up, longest first, each half of the previous one: the
        longer a match, the less its exact length matters."""
        length, lengths = self.max_trie_depth - 1, {self.min_match}
        while length > self.min_match:
            lengths.add(length)
            length //= 2
        return tuple(sorted(lengths, reverse=True))

    def breadths(self, topk: int) -> tuple[int, ...]:
        """Returns the most continuations for each length; they rise linearly as lengths fall."""
        low, span = min(self.min_breadth, topk), max(self.max_trie_depth - 2, 1)
        shares = ((length - 1) / span for length in self.lengths)
        return tuple(max(low, round(topk - (topk - low) * share)) for share in shares)


@dataclass(slots=True)
class Cursor:
    """How much of a text the index holds.

    Attributes:
        seed: of the text's hashes. Texts of one salt have one seed, and match only each other.
        num_seen: tokens added to the index.
        end: position behind the last token added.
    """

    seed: int = 0
    num_seen: int = 0
    end: int = 0

    @classmethod
    def of(cls, salt: str = "") -> Cursor:
        digest = hashlib.blake2b(salt.encode(), digest_size=8).digest() if salt else b""
        return cls(int.from_bytes(digest) >> 1)


Text = tuple[Cursor, Sequence[int]]
"""A cursor, and all tokens of its text."""


@dataclass(frozen=True, slots=True, eq=False)
class _Keys:
    """Hashes of the contexts before P places of texts, for each of L lengths.

    Attributes:
        buckets: `[P, L]`, rows of the table.
        tags: `[P, L]`, more hash bits, in the upper half of a word.
        are_whole: `[P, L]`, whether the text has so many tokens before the place; None: all do.
    """

    buckets: Integers
    tags: Words
    are_whole: Flags | None

    def of(self, places: slice) -> _Keys:
        """Returns the hashes of some places."""
        are_whole = None if self.are_whole is None else self.are_whole[places]
        return _Keys(self.buckets[places], self.tags[places], are_whole)


@dataclass(frozen=True, slots=True, eq=False)
class _HashedTexts:
    """The new tokens of several texts, and hashes of the contexts before them.

    Attributes:
        keys: of the contexts before each new token, then of the end of each text.
        token_ids, hashes: `[T]`, of the new tokens.
        num_after: `[T]`, tokens of the text after each new token.
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
    """N-grams of many texts, and candidate trees made of them.

    *Positions* number the token slots handed out since the start; the ring holds the latest ones.
    A table entry is a position in the lower half of a word, and in the upper half hash bits of the
    context before it, so one look-up in four billion confuses two n-grams. A new n-gram replaces an
    older one with the same table entry, and new pages replace the oldest when the ring is full. An
    n-gram's entry is its latest position that is not near the end of a text, if there is one.
    """

    def __init__(self, options: NgramOptions) -> None:
        longest = options.max_trie_depth - 1
        assert 1 <= options.min_match <= longest < PAGE, "a prediction needs a token of context"
        self._options = options
        self._lengths = np.array(options.lengths)
        self._miss_probs = 1 / (self._lengths + 1)
        self._table = np.zeros((max(options.capacity // WAYS, 1), WAYS), np.uint64)
        self._entries = self._table.reshape(-1)
        is_counted = options.match_type is MatchType.PROB
        self._counts = np.zeros(self._entries.size, np.int16) if is_counted else None
        self._num_pages = max(options.capacity // (len(self._lengths) * PAGE), 2)
        # The last page stays empty: it is the next page of those that have none.
        self._pages = np.full((self._num_pages + 1, PAGE), _NONE, np.int32)
        self._tokens = self._pages.reshape(-1)
        self._next_pages = np.full(self._num_pages + 1, self._num_pages)
        self._size = self._num_pages * PAGE
        self._first = self._size + PAGE  # so that the zero of an empty entry is below the ring
        self._head = self._first

    @property
    def num_tokens(self) -> int:
        """Token slots in use, those behind the ends of texts included."""
        return min(self._head - self._first, self._size)

    @property
    def num_forgotten(self) -> int:
        """Token slots that were overwritten."""
        return self._head - self._first - self.num_tokens

    @property
    def context_tokens(self) -> int:
        """Number of tokens at the end of a text on which its tree depends."""
        return self._options.max_trie_depth - 1

    def take_in(self, texts: Iterable[Text]) -> None:
        """Adds the new tokens of texts."""
        for batch in self._batches(texts):
            self._take_in(batch)

    def grow(self, texts: Iterable[Text], shape: TreeShape) -> list[TokenTree]:
        """Adds the new tokens of texts; returns a tree of continuations of each, perhaps empty."""
        trees: list[TokenTree] = []
        for batch in self._batches(texts):
            trees += self._trees(self._take_in(batch).ends, shape)
        return trees

    def grow_ahead(
        self, seed: int, texts: Iterable[Sequence[int]], shape: TreeShape
    ) -> list[TokenTree]:
        """Returns trees of hypothetical texts, without adding their tokens.

        Args:
            seed: of the cursor of the texts.
            texts: the last `context_tokens` of each text, or all tokens of a shorter one.
        """
        trees: list[TokenTree] = []
        for batch in self._batches((Cursor(seed, len(ids)), ids) for ids in texts):
            trees += self._trees(self._hash(batch).ends, shape)
        return trees

    def check(self) -> None:
        """Asserts that every entry points to a token, and lies in the way of that token's hash."""
        positions = (self._entries & np.uint64(_LOWER)).view(np.int64)
        slots = (positions >= self._oldest).nonzero()[0]
        assert (positions < self._head).all()
        token_ids = self._tokens[positions[slots] % self._size].astype(np.int64)
        assert (token_ids >= 0).all()
        assert (_ways(_mixed(token_ids.view(np.uint64))) == slots % WAYS).all()
        assert (self._pages[-1] == _NONE).all()

    @property
    def _oldest(self) -> int:
        """The lowest position that the ring holds."""
        return self._head - self._size

    def _batches(self, texts: Iterable[Text]) -> Iterator[list[Text]]:
        """Yields batches of texts with at most `MAX_TOKENS` tokens to hash. The beginning of a
        longer text is added at once."""
        batch, room, limit = list[Text](), MAX_TOKENS, MAX_TOKENS - PAGE
        for cursor, token_ids in texts:
            while len(token_ids) - cursor.num_seen > limit:
                self._take_in([(cursor, token_ids[: cursor.num_seen + limit])])
            num_tokens = len(token_ids) - cursor.num_seen + PAGE
            if num_tokens > room:
                yield batch
                batch, room = [], MAX_TOKENS
            batch.append((cursor, token_ids))
            room -= num_tokens
        if batch:
            yield batch

    def _take_in(self, texts: Sequence[Text]) -> _HashedTexts:
        hashed = self._hash(texts)
        if len(hashed.token_ids):
            positions = self._assign_positions(texts)
            # A ring that is too small for all tokens holds the last ones.
            held = slice(None) if positions.min() >= self._oldest else positions >= self._oldest
            self._tokens[positions[held] % self._size] = hashed.token_ids[held]
            self._insert(hashed, positions)
        return hashed

    def _hash(self, texts: Sequence[Text]) -> _HashedTexts:
        """Hashes the contexts before each new token and before the end of each text.

        A hash is a polynomial in the tokens modulo 2^64. The hash of a context is the difference of
        two prefix sums.
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

        # The first token is a placeholder that belongs to no context.
        tokens = np.frombuffer(read, np.int64)
        hashes = _mixed(tokens.view(np.uint64))
        sums = (hashes * _INVERSES[: len(hashes)]).cumsum()
        begins = stops[:, None] - self._lengths
        are_whole = None
        if is_short:
            firsts = np.concatenate(([0], ends[:-1]))
            are_whole = begins >= np.concatenate((firsts.repeat(num_new), firsts))[:, None]
            np.maximum(begins, 0, out=begins)
        words = (sums[stops, None] - sums[begins]) * _POWERS[stops, None]
        if any(seeds):
            seed_words = np.array(seeds, np.uint64)
            words += np.concatenate((seed_words.repeat(num_new), seed_words))[:, None]
        buckets = (words * _MULTIPLIER >> _HALF) * np.uint64(len(self._table)) >> _HALF
        keys = _Keys(buckets.view(np.int64), words * _TAG & _UPPER, are_whole)
        new += 1
        return _HashedTexts(keys, tokens[new], hashes[new], ends.repeat(num_new) - new)

    def _assign_positions(self, texts: Iterable[Text]) -> Integers:
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
                start = self._add_pages(cursor, num_new - room)
                runs.extend((end, room, start, num_new - room))
        starts, counts = np.frombuffer(runs, np.int64).reshape(-1, 2).T
        return _ranges(starts, counts)

    def _add_pages(self, cursor: Cursor, num_tokens: int) -> int:
        """Gives a text new pages for `num_tokens`; returns the position of the first token."""
        start, last_end = self._head, cursor.end
        self._head += -(-num_tokens // PAGE) * PAGE
        cursor.end = start + num_tokens
        pages = np.arange(start // PAGE, self._head // PAGE) % self._num_pages
        self._pages[pages] = _NONE
        self._next_pages[pages[:-1]] = pages[1:]
        self._next_pages[pages[-1]] = self._num_pages
        if self._oldest < last_end <= start:
            self._next_pages[(last_end - 1) // PAGE % self._num_pages] = pages[0]
        return start

    def _insert(self, hashed: _HashedTexts, positions: Integers) -> None:
        """Adds the positions of new tokens to the table, under the contexts before them."""
        keys = hashed.before
        slots = keys.buckets * WAYS + _ways(hashed.hashes)[:, None]
        entries = keys.tags | positions.view(np.uint64)[:, None]
        is_new = np.ones(slots.shape, np.bool_) if keys.are_whole is None else keys.are_whole
        if self._counts is not None:
            self._count(slots[is_new], entries[is_new])
        # Few tokens follow near the end of a growing text, so an older entry of the same n-gram
        # stays.
        is_near = hashed.num_after < NEAR_END
        near = slice(None) if is_near.all() else is_near.nonzero()[0]
        present = self._entries[slots[near]]
        present_positions = (present & np.uint64(_LOWER)).view(np.int64)
        is_same = (present ^ entries[near] < _END) & (present_positions >= self._oldest)
        is_same &= self._tokens[present_positions % self._size] == hashed.token_ids[near, None]
        is_new[near] &= ~is_same
        self._entries[slots[is_new]] = entries[is_new]

    def _count(self, slots: Integers, entries: Words) -> None:
        """Adds one to the counts of n-grams; counts of replaced n-grams start at zero."""
        assert self._counts is not None
        self._counts[slots[self._entries[slots] ^ entries >= _END]] = 0
        np.add.at(self._counts, slots, np.int16(1))
        self._counts[slots] = np.minimum(self._counts[slots], _MAX_COUNT)

    def _trees(self, keys: _Keys, shape: TreeShape) -> list[TokenTree]:
        """Returns the trees of texts, by the keys of their ends."""
        trees = [EMPTY_TREE] * len(keys.buckets)
        owners, lengths, scores, positions = self._matches(keys, shape.topk)
        if not len(owners):
            return trees
        max_nodes, depth = shape.max_node_count, min(shape.num_steps, shape.max_node_count, PAGE)
        is_first = np.concatenate(([True], owners[1:] != owners[:-1]))
        first = is_first.nonzero()[0]
        chains = self._chains(positions[first], depth)
        # If the first chain fills the tree, another one must be more probable than its last node.
        bounds = np.zeros(len(trees))
        if depth == max_nodes:
            lasts = scores[first] * (lengths[first] + 1) / (lengths[first] + max_nodes)
            bounds[owners[first]] = np.where(chains[:, -1] != _NONE, lasts, 0.0)
        matches = first
        later = (~is_first & (scores > bounds[owners])).nonzero()[0]
        if len(later):
            matches = np.concatenate((first, later))
            chains = np.concatenate((chains, self._chains(positions[later], depth)))
        text_chains: dict[int, list[_Chain]] = {}
        columns = owners[matches], lengths[matches], scores[matches], chains
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for owner, length, score, tokens in rows:
            text_chains.setdefault(owner, []).append((length, score, tokens))
        for owner, group in text_chains.items():
            is_single = len(group) == 1
            trees[owner] = _chain_tree(*group[0]) if is_single else _merged_tree(group, shape)
        return trees

    def _matches(
        self, keys: _Keys, topk: int
    ) -> tuple[Integers, Integers, NDArray[np.float64], Integers]:
        """Returns where the ends of texts occurred before, by text and the longest match first.

        Returns:
            For each match: the number of its text, its length, the probability of the token that
            followed (0 beyond the allowed breadth), and the position of that token.
        """
        entries = self._table[keys.buckets]
        entries ^= keys.tags[:, :, None]
        if keys.are_whole is not None:
            entries[~keys.are_whole] = _UPPER
        is_seen = (entries - np.uint64(self._oldest)) < self._size
        # Skip positions that a longer match has found.
        is_seen[:, 1:] &= entries[:, 1:] != entries[:, :-1]
        slots = is_seen.reshape(-1).nonzero()[0]
        groups = slots // WAYS
        order = (groups << 44) + _LOWER - entries.reshape(-1)[slots].view(np.int64)
        if self._counts is not None:
            places = keys.buckets.reshape(-1)[groups] * WAYS + slots % WAYS
            order += _MAX_COUNT - self._counts[places].astype(np.int64) << 32
        order.sort()
        groups = order >> 44
        sizes = np.bincount(groups, minlength=1)
        ranks = np.arange(len(groups)) - groups.searchsorted(groups)
        owners, kinds = np.divmod(groups, len(self._lengths))
        lengths, shares = _match_lengths(self._options, topk)
        # A shorter match has the probability that none of the longer matches continues.
        remaining = np.where(is_seen.any(2), self._miss_probs, 1.0).cumprod(1).reshape(-1)
        scores = remaining[groups] * shares[kinds, ranks]
        if self._counts is None:
            scores /= sizes[groups]
        else:
            weights = _MAX_COUNT - (order >> 32 & _MAX_COUNT)
            scores *= weights / np.bincount(groups, weights, minlength=1)[groups]
        return owners, lengths[kinds, ranks], scores, _LOWER - (order & _LOWER)

    def _chains(self, positions: Integers, depth: int) -> NDArray[np.int32]:
        """Returns `[C, depth]`, the tokens from C positions on; -1 behind the end of a text."""
        pages, offsets = np.divmod(positions % self._size, PAGE)
        places = offsets[:, None] + np.arange(depth)
        pages = np.where(places < PAGE, pages[:, None], self._next_pages[pages, None])
        return self._tokens[pages * PAGE + places % PAGE]


def _mixed(words: Words) -> Words:
    words = (words + _STEP) * _MULTIPLIER
    words ^= words >> _HALF
    words *= _STEP
    words ^= words >> _HALF
    return words


def _ways(hashes: Words) -> Integers:
    ways: Integers = (hashes >> _WAY_SHIFT).view(np.int64)
    return ways


def _ranges(starts: Integers, counts: Integers) -> Integers:
    """Returns the concatenated ranges of `count` numbers from each `start`."""
    if len(counts) == 1:
        return np.arange(int(starts[0]), int(starts[0] + counts[0]))
    ends = counts.cumsum()
    ranges: Integers = np.arange(ends[-1]) + (starts + counts - ends).repeat(counts)
    return ranges


@functools.lru_cache(16)
def _match_lengths(options: NgramOptions, topk: int) -> tuple[Integers, NDArray[np.float64]]:
    """Returns two arrays `[L, WAYS]`, by length of a match and rank of its continuation. The first
    is the length that the continuation counts as: the longest whose breadth allows the rank, or 0.
    The second is the hit probability of that length, divided by the match's miss probability."""
    lengths = np.zeros((len(options.lengths), WAYS), np.int64)
    for kind, rank in np.ndindex(*lengths.shape):
        pairs = zip(options.lengths[kind:], options.breadths(topk)[kind:], strict=True)
        lengths[kind, rank] = next((length for length, breadth in pairs if rank < breadth), 0)
    return lengths, lengths / (lengths + 1) * (np.array(options.lengths)[:, None] + 1)


_Chain = tuple[int, float, list[int]]
"""Length of the match, probability of the first token, and the tokens, with -1 at the end."""


def _chain_tree(length: int, score: float, token_ids: list[int]) -> TokenTree:
    if token_ids[-1] == _NONE:
        token_ids = token_ids[: token_ids.index(_NONE)]
    count = len(token_ids)
    log_probs = (math.log(score), *_STEP_LOG_PROBS[length + 1 : length + count])
    return TokenTree(tuple(token_ids), CHAIN_PARENTS[:count], log_probs)


def _merged_tree(chains: Sequence[_Chain], shape: TreeShape) -> TokenTree:
    """Returns the most probable nodes of several chains as a tree."""
    token_ids, parents, log_probs = list[int](), list[int | None](), list[float]()
    max_nodes, topk = shape.max_node_count, shape.topk
    nodes: dict[tuple[int | None, int], int] = {}
    num_children: dict[int | None, int] = {}
    # Entries: negative probability, index of the chain, the chain's last node so far, its depth.
    heap: list[tuple[float, int, int | None, int]] = [
        (-score, number, None, 0) for number, (_, score, _) in enumerate(chains)
    ]
    heapq.heapify(heap)
    while heap and len(token_ids) < max_nodes:
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
            log_probs.append(_STEP_LOG_PROBS[length + depth] if depth else math.log(-cost))
        if depth + 1 < len(tokens):
            cost *= (length + depth + 1) / (length + depth + 2)
            heapq.heappush(heap, (cost, number, node, depth + 1))
    return TokenTree(tuple(token_ids), tuple(parents), tuple(log_probs))
