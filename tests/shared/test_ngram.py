"""The trie against a brute-force count of every n-gram, and its bound on nodes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from services.draft.drafters.ngram import NgramDrafter
from shared.ngram import ROOT, NgramOptions, NgramTrie


def _insert(trie: NgramTrie, text: Sequence[int]) -> None:
    nodes: list[int] = []
    for token in text:
        nodes = [trie.see(ROOT, token), *(trie.see(node, token) for node in nodes)]
        nodes = nodes[: trie.max_depth - 1]


def _text(seed: int, length: int, vocab_size: int = 4) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(length)]


@pytest.mark.parametrize("seed", range(5))
def test_counts_equal_a_brute_force_count_of_ngrams(seed: int) -> None:
    text, depth = _text(seed, 80), 5
    trie = NgramTrie(max_depth=depth, capacity=10_000)
    _insert(trie, text)
    ngrams = Counter(
        tuple(text[end - length : end])
        for end in range(len(text) + 1)
        for length in range(1, min(depth, end) + 1)
    )
    found = {ngram: trie.find(ngram) for ngram in ngrams}
    assert {g: trie.count(n) for g, n in found.items() if n is not None} == ngrams
    assert len(trie) == len(ngrams)
    trie.check()


def test_unseen_ngrams_are_not_found() -> None:
    trie = NgramTrie(max_depth=3, capacity=100)
    _insert(trie, [1, 2, 3, 4])
    assert trie.find([2, 1]) is None
    assert trie.find([1, 2, 3, 4]) is None, "longer than the trie is deep"


@pytest.mark.parametrize("seed", range(3))
def test_children_come_most_recent_first(seed: int) -> None:
    text = _text(seed, 60)
    trie = NgramTrie(max_depth=3, capacity=10_000)
    _insert(trie, text)
    for token in set(text):
        node = trie.child(ROOT, token)
        assert node is not None
        last_seen = {text[i + 1]: i for i in range(len(text) - 1) if text[i] == token}
        expected = sorted(last_seen, key=lambda following: -last_seen[following])
        assert [trie.token(child) for child in trie.children(node)] == expected


@pytest.mark.parametrize("seed", range(5))
def test_capacity_bounds_the_nodes_and_keeps_the_structure(seed: int) -> None:
    drafter = NgramDrafter(NgramOptions(max_trie_depth=6, capacity=40))
    for part in range(10):
        drafter.learn(_text(seed * 10 + part, 50, vocab_size=9))
        drafter.check()
    assert drafter.gauges()["trie_node_count"] == 40
    assert drafter.gauges()["trie_eviction_count"] > 0


def test_the_least_recently_seen_leaf_is_evicted_first() -> None:
    trie = NgramTrie(max_depth=2, capacity=4)
    one = trie.see(ROOT, 1)
    trie.see(one, 2)
    trie.see(ROOT, 3)
    trie.see(ROOT, 4)
    trie.see(one, 2)
    trie.see(ROOT, 5)
    assert trie.find([3]) is None
    assert trie.find([1, 2]) is not None
    assert trie.find([4]) is not None
    assert trie.find([5]) is not None
    trie.check()
