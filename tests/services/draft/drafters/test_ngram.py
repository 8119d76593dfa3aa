"""What the n-gram drafter proposes, against brute force over the plain text."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from services.draft.drafters.drafter import VerifiedTree
from services.draft.drafters.ngram import NgramDrafter
from services.draft.sequence import DraftSequence, SequenceKey
from shared.ngram import MatchType, NgramOptions
from shared.tokens import Condition, SamplingParams, TokenTree, TreeShape

CHAIN = TreeShape(num_steps=4, topk=1, num_draft_tokens=5)
WIDE = TreeShape(num_steps=17, topk=10, num_draft_tokens=12)


def _sequence(token_ids: Sequence[int], number: int = 1, salt: str = "") -> DraftSequence:
    return DraftSequence(
        SequenceKey(1, number),
        list(token_ids),
        len(token_ids),
        SamplingParams(),
        0,
        True,
        99,
        64,
        cache_salt=salt,
    )


def _propose(
    drafter: NgramDrafter, text: Sequence[int], shape: TreeShape, salt: str = ""
) -> TokenTree:
    sequence = _sequence(text, salt=salt)
    drafter.open(sequence)
    (proposal,) = drafter.propose([sequence], shape)
    drafter.close(sequence)
    return proposal.tree


def _paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.token_ids[n] for n in tree.path(node)) for node in range(len(tree))}


def _occurs(part: Sequence[int], text: Sequence[int]) -> bool:
    return any(list(text[i : i + len(part)]) == list(part) for i in range(len(text)))


def test_a_repeated_text_is_drafted_to_the_full_depth() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    tree = _propose(NgramDrafter(NgramOptions()), [*text, 9, *text[:3]], CHAIN)
    assert tree.token_ids == (4, 5, 6, 7)
    assert tree.parent_indices == (None, 0, 1, 2)


def test_nothing_is_proposed_for_a_text_without_repetition() -> None:
    tree = _propose(NgramDrafter(NgramOptions()), [1, 2, 3, 4], WIDE)
    assert len(tree) == 0


@pytest.mark.parametrize("match_type", MatchType)
@pytest.mark.parametrize("capacity", [60, 10_000])
def test_texts_of_another_salt_are_not_seen(match_type: MatchType, capacity: int) -> None:
    """However often pages go from one salt to another."""
    drafter = NgramDrafter(NgramOptions(match_type, max_trie_depth=6, capacity=capacity))
    own = {"": 10, "a": 20, "b": 30}
    for number, salt in enumerate(("", "a", "b", "a", "b", "", "a", "", "b")):
        text = [1, 2, 3, own[salt] + number, 1, 2, 3]
        tree = _propose(drafter, text, CHAIN, salt)
        assert {token // 10 for token in tree.token_ids} <= {0, own[salt] // 10}
        assert capacity == 60 or tree.token_ids[0] == own[salt] + number
        drafter.check()
    if capacity > 60:
        assert not len(_propose(drafter, [1, 2, 3], CHAIN, "c"))
        assert len(_propose(drafter, [1, 2, 3], CHAIN, "a"))


def test_the_longest_match_decides_the_first_candidate() -> None:
    text = [1, 2, 3, 4, 50, 8, 3, 4, 60, 9, 4, 70, 1, 2, 3, 4]
    tree = _propose(NgramDrafter(NgramOptions()), text, TreeShape(1, 10, 12))
    assert tree.token_ids == (50, 60, 70)


def _text(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(5) for _ in range(length)]


@pytest.mark.parametrize("match_type", list(MatchType))
@pytest.mark.parametrize("seed", range(6))
def test_every_path_follows_a_suffix_of_the_text_somewhere_in_it(
    match_type: MatchType, seed: int
) -> None:
    text = _text(seed, 120)
    tree = _propose(NgramDrafter(NgramOptions(match_type, max_trie_depth=6)), text, WIDE)
    for path in _paths(tree):
        assert _occurs([text[-1], *path], text)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("match_type", list(MatchType))
@pytest.mark.parametrize(
    "shape", [CHAIN, WIDE, TreeShape(2, 3, 8), TreeShape(5, 2, 20), TreeShape(1, 16, 257)]
)
def test_trees_keep_to_the_shape(seed: int, match_type: MatchType, shape: TreeShape) -> None:
    tree = _propose(NgramDrafter(NgramOptions(match_type)), _text(seed, 200), shape)
    assert 0 < len(tree) <= shape.max_node_count
    assert max(tree.depths) <= shape.num_steps
    assert max(Counter(tree.parent_indices).values()) <= shape.topk
    assert len(_paths(tree)) == len(tree), "no path twice"


def test_bfs_prefers_the_recent_and_prob_the_frequent_continuation() -> None:
    text = [1, 7, 1, 7, 1, 7, 1, 8, 1]
    bfs = NgramDrafter(NgramOptions(MatchType.BFS, max_trie_depth=2))
    prob = NgramDrafter(NgramOptions(MatchType.PROB, max_trie_depth=2))
    assert _propose(bfs, text, CHAIN).token_ids[0] == 8
    assert _propose(prob, text, CHAIN).token_ids[0] == 7


@pytest.mark.parametrize("seed", range(4))
def test_prob_ranks_children_by_their_count(seed: int) -> None:
    text = _text(seed, 150)
    drafter = NgramDrafter(NgramOptions(MatchType.PROB, max_trie_depth=2))
    tree = _propose(drafter, text, TreeShape(1, 16, 17))
    counts = Counter(text[i + 1] for i in range(len(text) - 1) if text[i] == text[-1])
    proposed = [counts[token] for token in tree.token_ids]
    assert proposed == sorted(counts.values(), reverse=True)


def test_min_breadth_widens_trees_after_long_matches() -> None:
    text = [*range(1, 8), 20, *range(1, 8), 21, *range(1, 8)]
    shape = TreeShape(1, 8, 2)
    narrow = NgramOptions(max_trie_depth=8, min_breadth=1)
    assert _propose(NgramDrafter(narrow), text, shape).token_ids == (21,)
    shape = TreeShape(1, 8, 9)
    wide = NgramOptions(max_trie_depth=8, min_breadth=2)
    assert _propose(NgramDrafter(wide), text, shape).token_ids[:2] == (21, 20)


def test_other_sequences_and_the_corpus_feed_the_index() -> None:
    drafter = NgramDrafter(NgramOptions())
    assert len(_propose(drafter, [1, 2, 3], CHAIN)) == 0
    drafter.learn([1, 2, 3, 4, 5])
    assert _propose(drafter, [1, 2, 3], CHAIN).token_ids == (4, 5)


def test_taking_in_by_parts_equals_taking_in_at_once() -> None:
    text = [*range(40), *range(20)]
    at_once = _propose(NgramDrafter(NgramOptions()), text, WIDE)
    drafter = NgramDrafter(NgramOptions())
    sequence = _sequence(text[:10])
    drafter.open(sequence)
    for token in text[10:]:
        drafter.catch_up([sequence], 3)
        sequence.token_ids.append(token)
    assert drafter.propose([sequence], WIDE)[0].tree == at_once


@pytest.mark.parametrize("seed", range(3))
def test_a_full_index_still_proposes_only_what_was_seen(seed: int) -> None:
    text = _text(seed, 400)
    drafter = NgramDrafter(NgramOptions(max_trie_depth=5, capacity=60))
    tree = _propose(drafter, text, WIDE)
    drafter.check()
    for path in _paths(tree):
        assert _occurs([text[-1], *path], text)


def test_ahead_of_a_verdict_it_looks_up_what_followed_then() -> None:
    drafter = NgramDrafter(NgramOptions())
    drafter.lookahead.budget = 4
    period = [1, 2, 3, 4, 5, 6, 7, 8]
    sequence = _sequence([*period, *period, 1, 2])
    drafter.open(sequence)
    shape = TreeShape(3, 1, 4)
    [proposal] = drafter.propose([sequence], shape)
    assert proposal.tree.token_ids == (3, 4, 5)
    drafter.lookahead.begin(VerifiedTree(sequence, proposal.tree, shape, 4))
    prepared = {each.condition: each.tree.token_ids for each in drafter.lookahead.advance()}
    assert prepared == {Condition(2, 6): (7, 8, 1)}, "nothing else ever followed"
    assert not drafter.lookahead.has_work


def test_each_continuation_that_was_seen_is_prepared_for_likeliest_first() -> None:
    drafter = NgramDrafter(NgramOptions())
    drafter.lookahead.budget = 4
    sequence = _sequence([1, 2, 9, 5, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2])
    drafter.open(sequence)
    shape = TreeShape(2, 1, 3)
    [proposal] = drafter.propose([sequence], shape)
    assert proposal.tree.token_ids == (3, 4)
    drafter.lookahead.begin(VerifiedTree(sequence, proposal.tree, shape, 2))
    conditions = [each.condition for each in drafter.lookahead.advance()]
    assert conditions == [Condition(1, 1), Condition(None, 9)]
