"""Masks at every node of a tree are those that the words of a small language leave."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from services.target.grammars.matcher import GrammarMatcher, MaskedTree, MaskExecutor
from shared.grammar import GrammarKind
from shared.tokens import EMPTY_TREE, TokenTree
from tests.helpers.grammars import (
    EOS,
    SPELLINGS,
    allowed,
    compiled,
    is_forced,
    regex,
    row_tokens,
    spelled,
    tree_tokens,
)

# Words with common beginnings, with several ways to cut them into tokens.
LANGUAGE = {"ab", "abc", "abcd", "abxy", "x", "xx", "xxy", "0121"}
PATTERN = "|".join(sorted(LANGUAGE))
VOCABULARY = range(len(SPELLINGS))
GARBAGE = 0x2A2A2A2A


def _is_exact(ids: set[int] | None, output: Sequence[int]) -> bool:
    right = allowed(LANGUAGE, output)
    if ids is None:
        return False
    return (bool(ids) and ids <= right) if is_forced(LANGUAGE, output) else ids == right


def _outputs() -> list[tuple[int, ...]]:
    """Returns every output that is the beginning of a word, ended words included."""
    found: list[tuple[int, ...]] = [()]
    for output in found:
        found += [(*output, token_id) for token_id in sorted(allowed(LANGUAGE, output))]
    return found


@st.composite
def _trees(draw: st.DrawFn) -> TokenTree:
    num_nodes = draw(st.integers(1, 12))
    parents = [draw(st.sampled_from([None, *range(node)])) for node in range(num_nodes)]
    # Mostly tokens of the language, so that paths get somewhere.
    ids = st.sampled_from([EOS, *range(1, 9), 12, 13, 14, 15, 16, 19, 20, 21, 22])
    return TokenTree(tuple(draw(ids) for _ in parents), tuple(parents))


def _matcher(output: tuple[int, ...]) -> GrammarMatcher:
    matcher = regex(PATTERN).matcher()
    for token_id in output:
        matcher.advance(token_id)
    return matcher


def test_root_mask_is_exact_after_every_beginning_of_every_word() -> None:
    outputs = [output for output in _outputs() if allowed(LANGUAGE, output)]
    assert len(outputs) > 30
    for output in outputs:
        [mask] = tree_tokens(_matcher(output), EMPTY_TREE)
        assert _is_exact(mask, output), spelled(output)


def test_output_has_ended_where_no_word_goes_on() -> None:
    for output in _outputs():
        going_on = allowed(LANGUAGE, output) - {EOS}
        assert _matcher(output).has_ended is not bool(going_on), output


@settings(max_examples=150)
@given(tree=_trees(), start=st.sampled_from([(), (5,), (1, 2), (19,), (12,)]))
def test_node_masks_are_exact_and_leave_no_trace(tree: TokenTree, start: tuple[int, ...]) -> None:
    matcher = _matcher(start)
    masks = tree_tokens(matcher, tree)
    assert masks == tree_tokens(matcher, tree)
    for node in range(len(tree)):
        path = [tree.token_ids[each] for each in tree.path(node)]
        output = [*start, *path]
        reachable = all(
            token_id in allowed(LANGUAGE, output[: len(start) + i])
            and not _matcher(tuple(output[: len(start) + i])).has_ended
            for i, token_id in enumerate(path)
        )
        if not reachable:
            assert masks[node + 1] is None
        elif EOS not in path:
            assert _is_exact(masks[node + 1], output)
            assert masks[node + 1] == tree_tokens(_matcher(tuple(output)), EMPTY_TREE)[0]


@settings(max_examples=50)
@given(trees=st.lists(_trees(), min_size=1, max_size=4), gap=st.integers(0, 2))
def test_masks_of_many_trees_are_those_of_each_whatever_the_memory_held(
    trees: list[TokenTree], gap: int
) -> None:
    """Rows between the trees belong to others: they stay as they are."""
    starts = [(), (5,), (1, 2), (19,)]
    matchers = [_matcher(start) for start, _ in zip(starts, trees, strict=False)]
    ends = list(itertools.accumulate(1 + len(tree) + gap for tree in trees))
    masks = np.full((ends[-1], matchers[0].num_words), GARBAGE, np.int32)
    firsts = [end - 1 - len(tree) for end, tree in zip(ends, trees, strict=True)]
    masked = list(map(MaskedTree, matchers, trees, firsts))
    MaskExecutor().fill(masked, masks)
    for each, start in zip(masked, starts, strict=False):
        assert row_tokens(masks[each.rows]) == tree_tokens(_matcher(start), each.tree)
        masks[each.rows] = GARBAGE
    assert (masks == GARBAGE).all()


def test_outputs_of_one_grammar_do_not_disturb_each_other() -> None:
    grammar = regex(PATTERN)
    one, other = grammar.matcher(), grammar.matcher()
    one.advance(5)
    assert _is_exact(tree_tokens(other, EMPTY_TREE)[0], ())
    assert _is_exact(tree_tokens(one, EMPTY_TREE)[0], (5,))


def test_dead_end_is_a_failure_that_names_its_place() -> None:
    matcher = regex("aZ|ab").matcher()  # no token spells Z, so only b can follow
    matcher.advance(1)
    assert tree_tokens(matcher, EMPTY_TREE)[0] == {2}
    matcher = regex("aZ").matcher()
    matcher.advance(1)
    assert tree_tokens(matcher, EMPTY_TREE) == [None]
    assert matcher.has_ended
    assert matcher.failure is not None
    assert matcher.failure.reason == "GRAMMAR_TOO_COMPLEX"
    assert "beyond 1 tokens" in matcher.failure.message


def test_bound_met_inside_a_tree_leaves_the_committed_state() -> None:
    """Only rows beyond the bound may not draw; the output itself goes on as without a tree."""
    text = "(a|b|ab|abc){1,40}x(a|b|ab|abc){1,40}"
    found = False
    for fuel in (20, 30, 40, 60, 80, 120, 200, 400):
        limits = LLParserLimits(step_lexer_fuel=fuel, precompute_large_lexemes=False)
        matcher = compiled(GrammarKind.REGEX, text, limits).matcher()
        chain = TokenTree.chain([1, 2, 5, 8, 1, 2, 5, 19, 1, 2, 5, 8])
        masks = tree_tokens(matcher, chain)
        if masks[0] is None:
            continue
        found |= None in masks
        assert matcher.failure is None
        fresh = compiled(GrammarKind.REGEX, text, limits).matcher()
        for token_id, mask in itertools.islice(zip(chain.token_ids, masks, strict=False), 3):
            if mask is not None and fresh.failure is None:
                assert tree_tokens(fresh, EMPTY_TREE)[0] == mask
                fresh.advance(token_id)
    assert found, "no bound was met; the test tests nothing"
