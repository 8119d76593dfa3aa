"""The n-gram index against a dictionary of every n-gram, and its bounds."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from shared import ngram
from shared.ngram import NEAR_END, PAGE, WAYS, Cursor, MatchType, NgramIndex, NgramOptions
from shared.tokens import TokenTree, TreeShape

ALPHABET = (1, 2, 3, 4, 5, 8, 10, 15, 16, 18, 20, 22, 24, 30, 31, 41)
"""Tokens of which each has a place of its own among the continuations of an n-gram."""
SHAPES = (
    TreeShape(17, 10, 12),
    TreeShape(5, 1, 6),
    TreeShape(5, 4, 16),
    TreeShape(1, 16, 17),
    TreeShape(3, 2, 40),
)


class Reference:
    """The same trees from dictionaries, one text and one token at a time."""

    def __init__(self, options: NgramOptions) -> None:
        self._options = options
        self._texts: list[list[int]] = []
        self._seen: dict[tuple[str, tuple[int, ...]], dict[int, tuple[int, int]]] = {}
        self._counts = Counter[tuple[str, tuple[int, ...], int]]()

    def take_in(self, text: list[int], salt: str) -> None:
        own, found = len(self._texts), list[tuple[dict[int, tuple[int, int]], int]]()
        self._texts.append(text)
        for place, length in itertools.product(range(len(text)), self._options.lengths):
            if length <= place:
                context = salt, tuple(text[place - length : place])
                known = self._seen.setdefault(context, {})
                if len(text) - place > NEAR_END or text[place] not in known:
                    found.append((known, place))
                self._counts[*context, text[place]] += 1
        for known, place in found:
            known[text[place]] = own, place

    def chains(self, text: list[int], salt: str, topk: int) -> list[tuple[int, float, list[int]]]:
        """Returns each chain with the length that matches and the probability of its first token:
        the longest match first, then the more recent or more frequent."""
        found, known, left = list[tuple[int, float, list[int]]](), set[tuple[int, int]](), 1.0
        lengths = self._options.lengths
        for kind, length in enumerate(lengths):
            context = salt, tuple(text[-length:])
            places = self._seen.get(context, {}) if length <= len(text) else {}
            order = [pair for pair in places.items() if pair[1] not in known]
            known |= set(places.values())
            counts = {token: self._counts[*context, token] for token, _ in order}
            order.sort(key=lambda pair: pair[1], reverse=True)
            if self._options.match_type is MatchType.PROB:
                order.sort(key=lambda pair: -counts[pair[0]])
            else:
                counts = dict.fromkeys(counts, 1)
            for rank, (token, (number, place)) in enumerate(order):
                allowed = zip(lengths[kind:], self._options.breadths(topk)[kind:], strict=True)
                counted = next((each for each, most in allowed if rank < most), None)
                if counted is not None:
                    share = counts[token] / sum(counts.values())
                    score = left * share * counted / (counted + 1)
                    found.append((counted, score, self._texts[number][place:]))
            left /= length + 1 if order else 1
        return found

    def tree(
        self, text: list[int], salt: str, shape: TreeShape, most: int
    ) -> dict[tuple[int, ...], float]:
        """Returns the most probable paths, with their probability."""
        paths: dict[tuple[int, ...], float] = {(): 1.0}
        chains = self.chains(text, salt, shape.topk)
        heap: list[tuple[float, int, tuple[int, ...]]] = [
            (-score, number, ()) for number, (_, score, _) in enumerate(chains)
        ]
        heapq.heapify(heap)
        while heap and len(paths) <= most:
            cost, number, above = heapq.heappop(heap)
            length, _, tokens = chains[number]
            depth = len(above)
            if depth >= min(len(tokens), shape.num_steps, shape.max_node_count):
                continue
            path = (*above, tokens[depth])
            siblings = sum(len(each) == depth + 1 and each[:-1] == above for each in paths)
            if path in paths or siblings < shape.topk:
                paths.setdefault(path, -cost)
                cost *= (length + depth + 1) / (length + depth + 2)
                heapq.heappush(heap, (cost, number, path))
        del paths[()]
        return paths


def _text(source: random.Random, length: int, words: Sequence[int] = ALPHABET) -> list[int]:
    """Returns a text in which runs come again."""
    text = source.choices(words, k=length // 3 + 1)
    while len(text) < length:
        start = source.randrange(len(text))
        text += text[start : start + source.randrange(1, 30)]
        text += source.choices(words, k=source.randrange(3))
    return text[:length]


def _paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.token_ids[n] for n in tree.path(node)) for node in range(len(tree))}


def _grown(
    index: NgramIndex, text: Sequence[int], shape: TreeShape = SHAPES[0], salt: str = ""
) -> TokenTree:
    [tree] = index.grow([(Cursor.of(salt), text)], shape)
    return tree


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("match_type", MatchType)
@pytest.mark.parametrize("terms", [(18, 1, 1), (6, 2, 1), (8, 1, 2), (2, 3, 1)])
def test_trees_are_those_of_a_dictionary_of_ngrams(
    terms: tuple[int, int, int], match_type: MatchType, seed: int
) -> None:
    depth, min_breadth, min_match = terms
    options = NgramOptions(match_type, depth, min_breadth=min_breadth, min_match=min_match)
    source, reference, index = random.Random(seed), Reference(options), NgramIndex(options)
    for number in range(12):
        text, salt = _text(source, source.randrange(1, 200)), source.choice(("", "", "mine"))
        if number == 5:
            text = text[:1]
        reference.take_in(text, salt)
        shape = source.choice(SHAPES)
        tree = reference.tree(text, salt, shape, shape.max_node_count)
        any_size = reference.tree(text, salt, shape, 10_000)
        # Of equal probability are several.
        found = sorted(any_size[path] for path in _paths(_grown(index, text, shape, salt)))
        assert found == pytest.approx(sorted(tree.values()))
    index.check()


def test_every_token_of_the_alphabet_has_its_place() -> None:
    assert len(ALPHABET) == WAYS
    text = [each for token in ALPHABET for each in (9, token)]
    tree = _grown(NgramIndex(NgramOptions()), [*text, 9], TreeShape(1, 16, 17))
    assert sorted(tree.token_ids) == sorted(ALPHABET)


class Running:
    """Texts of two salts that grow in turn, end, and make way for others."""

    def __init__(self, seed: int, options: NgramOptions) -> None:
        self.index = NgramIndex(options)
        self.source = random.Random(seed)
        self._options = options
        self._open: list[tuple[Cursor, list[int], str]] = []
        self._all: list[tuple[list[int], str]] = []

    def step(self, shape: TreeShape) -> None:
        """Lets some texts begin and all go on, and checks their trees."""
        source = self.source
        while len(self._open) < 5:
            salt = source.choice(("", "mine"))
            text = _text(source, source.randrange(1, 300), range(3, 40))
            self._open.append((Cursor.of(salt), text, salt))
            self._all.append((text, salt))
        for _, text, _ in self._open:
            text += _text(source, source.randrange(7), range(3, 40))
        trees = self.index.grow([each[:2] for each in self._open], shape)
        for tree, (_, text, salt) in zip(trees, self._open, strict=True):
            self._check(tree, text, salt, shape)
        del self._open[source.randrange(5)]

    def _check(self, tree: TokenTree, text: list[int], salt: str, shape: TreeShape) -> None:
        paths, last = _paths(tree), text[-self._options.min_match :]
        assert len(paths) == len(tree) <= shape.max_node_count
        assert max(Counter(tree.parent_indices).values(), default=0) <= shape.topk
        assert all(each <= 1e-9 for each in tree.log_probs)
        own = "".join(f"{text} " for text, each in self._all if each == salt)
        for path in paths:
            assert len(path) <= shape.num_steps
            assert str([*last, *path])[1:-1] in own, "it was never seen"


@pytest.mark.parametrize("match_type", MatchType)
@pytest.mark.parametrize("capacity", [64, 700, 3000, 1_000_000])
@pytest.mark.parametrize("seed", range(2))
def test_texts_that_grow_together_get_what_was_seen(
    seed: int, capacity: int, match_type: MatchType
) -> None:
    """However small the table is, and while pages go from one text to another."""
    running = Running(seed, NgramOptions(match_type, capacity=capacity, min_match=2))
    for step in range(40):
        running.step(SHAPES[step % len(SHAPES)])
    running.index.check()
    assert running.index.num_tokens <= max(capacity, 2 * PAGE)
    assert (running.index.num_forgotten > 0) == (capacity < 10_000)


def test_the_oldest_text_is_forgotten_first() -> None:
    num_lengths = len(NgramOptions().lengths)
    index = NgramIndex(NgramOptions(capacity=num_lengths * 6 * PAGE))
    texts = [list(range(100 * number, 100 * number + 90)) for number in range(4)]
    for text in texts:
        index.take_in([(Cursor.of(), text)])
    trees = index.grow_ahead(0, [text[:10] for text in texts], SHAPES[1])
    assert [bool(tree.token_ids) for tree in trees] == [False, True, True, True]


def test_a_text_may_be_longer_than_what_is_read_at_once() -> None:
    source, index = random.Random(0), NgramIndex(NgramOptions())
    text = [source.randrange(50_000) for _ in range(ngram.MAX_TOKENS + 3000)]
    _grown(index, text)
    for start in (0, ngram.MAX_TOKENS - 75, ngram.MAX_TOKENS, ngram.MAX_TOKENS + 2000):
        part = text[start : start + 30]
        assert _grown(index, part[:8], SHAPES[1]).token_ids == tuple(part[8:13])


def test_many_texts_are_read_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(1)
    texts = [_text(source, 150) for _ in range(9)]
    cursors = [Cursor.of() for _ in texts]
    monkeypatch.setattr(ngram, "MAX_TOKENS", 500)
    index = NgramIndex(NgramOptions())
    trees = index.grow(list(zip(cursors, texts, strict=True)), SHAPES[0])
    assert [bool(tree.token_ids) for tree in trees] == [True] * 9
    assert [cursor.num_seen for cursor in cursors] == [150] * 9


def test_all_is_forgotten_before_positions_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    index, text = NgramIndex(NgramOptions()), list(range(100))
    cursor = Cursor.of()
    index.take_in([(cursor, text)])
    monkeypatch.setattr(index, "_head", (1 << 32) - PAGE)
    assert not _grown(index, text[:9]).token_ids
    index.take_in([(cursor, [*text, *text])])
    assert _grown(index, text[:9], SHAPES[1]).token_ids == tuple(text[9:14])
    index.check()


def test_a_text_that_is_just_ahead_hides_no_whole_one() -> None:
    """Of several sequences that repeat one text, each is drafted to the full depth."""
    index, text = NgramIndex(NgramOptions()), list(range(100, 200))
    index.take_in([(Cursor.of(), text)])
    ahead, behind = Cursor.of(), Cursor.of()
    index.grow([(ahead, text[:52]), (behind, text[:50])], SHAPES[0])
    [_, tree] = index.grow([(ahead, text[:54]), (behind, text[:51])], SHAPES[0])
    assert tree.token_ids == tuple(text[51:62])


def test_nothing_is_taken_in_of_a_supposed_text() -> None:
    index = NgramIndex(NgramOptions())
    index.take_in([(Cursor.of(), [1, 2, 3, 4, 5, 6])])
    [tree, none] = index.grow_ahead(0, ([7, 8, 1, 2], [1, 2, 7]), SHAPES[1])
    assert (tree.token_ids, none.token_ids) == ((3, 4, 5, 6), ())
    assert not _grown(index, [7, 8]).token_ids


def test_a_text_that_comes_back_goes_on_where_another_began() -> None:
    index, text = NgramIndex(NgramOptions()), list(range(500))
    index.take_in([(Cursor.of(), text[:300])])
    again = Cursor.of()
    index.take_in([(again, text[:350])])
    index.take_in([(again, text)])
    for end in (10, 200, 345, 350, 470):
        assert _grown(index, text[:end][-9:], SHAPES[1]).token_ids == tuple(text[end : end + 5])
