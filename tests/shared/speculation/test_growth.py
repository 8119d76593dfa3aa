"""Grown trees against growth written with lists, for shapes with and without ties."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shared.speculation.tree import Beam, TreeGrowth, choose_children, row_paths
from shared.tokens import TokenTree, TreeShape

VOCAB_SIZE = 20
Path = tuple[int, ...]
Scores = Callable[[int, Path], Tensor]


def smooth_scores(tree: int, path: Path) -> Tensor:
    seed = hash((tree, path)) % 2**31
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def tied_scores(tree: int, path: Path) -> Tensor:
    """Halves, so that sums are exact and tie often; some children cost nothing."""
    seed = hash((tree, path)) % 2**31
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 1, (VOCAB_SIZE,), generator=generator) / 2.0


def sparse_scores(tree: int, path: Path) -> Tensor:
    """Two possible tokens, so that most children have no mass."""
    scores = torch.full((VOCAB_SIZE,), -math.inf)
    scores[(3 + len(path)) % VOCAB_SIZE] = -0.5
    scores[(9 + tree) % VOCAB_SIZE] = -1.0
    return scores


def grow(shape: TreeShape, scores: Scores, batch_size: int) -> tuple[TokenTree, ...]:
    growth = TreeGrowth(shape)
    roots = torch.stack([scores(b, ()) for b in range(batch_size)]).unsqueeze(1)
    growth.add(choose_children(roots, shape.topk))
    paths: list[list[Path]] = [[()] for _ in range(batch_size)]
    while not growth.is_complete:
        beam = growth.select_beam()
        paths = [extended(beam, b, paths[b]) for b in range(batch_size)]
        level = [torch.stack([scores(b, path) for path in paths[b]]) for b in range(batch_size)]
        growth.add(choose_children(torch.stack(level), shape.topk))
    return growth.finish()


def extended(beam: Beam, tree: int, before: list[Path]) -> list[Path]:
    tokens, parents = beam.token_ids[tree].tolist(), beam.parents[tree].tolist()
    return [(*before[parent], token) for token, parent in zip(tokens, parents, strict=True)]


def best_first(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def plain_growth(shape: TreeShape, scores: Scores, tree: int) -> TokenTree:
    """EAGLE-2 with lists: a candidate is (path score, own score, path, number)."""
    seen: list[tuple[Tensor, Tensor, Path]] = []
    beam: list[tuple[Tensor, Path]] = [(torch.zeros(()), ())]
    for _ in range(shape.num_steps):
        fresh = []
        for base, path in beam:
            own = scores(tree, path)
            order = best_first(own.tolist())
            fresh += [(base + own[t], own[t], (*path, t)) for t in order[: shape.topk]]
        seen += fresh
        best = best_first([float(score) for score, *_ in fresh])[: shape.topk]
        beam = [(fresh[i][0], fresh[i][2]) for i in best]
    best = best_first([float(score) for score, *_ in seen])
    kept = [seen[i] for i in sorted(best[: shape.max_node_count]) if seen[i][0] > -math.inf]
    numbers: dict[Path, int | None] = {(): None}
    numbers.update({path: node for node, (*_, path) in enumerate(kept)})
    return TokenTree(
        tuple(path[-1] for *_, path in kept),
        tuple(numbers[path[:-1]] for *_, path in kept),
        tuple(float(own) for _, own, _ in kept),
    )


SHAPES = [(1, 1, 2), (3, 1, 4), (5, 1, 3), (1, 4, 3), (2, 3, 8), (5, 4, 8), (5, 8, 32), (3, 4, 60)]


@pytest.mark.parametrize("shape", [TreeShape(*s) for s in SHAPES], ids=str)
@pytest.mark.parametrize("scores", [smooth_scores, tied_scores, sparse_scores])
def test_growth_is_that_of_plain_lists(shape: TreeShape, scores: Scores) -> None:
    for number, found in enumerate(grow(shape, scores, batch_size=2)):
        expected = plain_growth(shape, scores, number)
        assert found.token_ids == expected.token_ids
        assert found.parent_indices == expected.parent_indices
        assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


def test_topk_one_is_the_greedy_chain() -> None:
    (grown,) = grow(TreeShape(4, 1, 9), smooth_scores, batch_size=1)
    assert grown.parent_indices == (None, 0, 1, 2)
    path: Path = ()
    for token in grown.token_ids:
        assert token == int(smooth_scores(0, path).argmax())
        path = (*path, token)


def test_scores_of_zero_still_keep_parents() -> None:
    """A child that costs nothing ties with its parent, which must win."""

    def free(_tree: int, _path: Path) -> Tensor:
        return torch.zeros(VOCAB_SIZE)

    (grown,) = grow(TreeShape(4, 2, 3), free, batch_size=1)
    assert grown.parent_indices == (None, None)


def test_a_rounded_positive_score_does_not_lift_a_child_over_its_parent() -> None:
    def rounded(_tree: int, path: Path) -> Tensor:
        return torch.full((VOCAB_SIZE,), -1.0 if not path else 1e-7)

    (grown,) = grow(TreeShape(3, 2, 3), rounded, batch_size=1)
    assert grown.parent_indices == (None, None)


def test_a_draft_without_any_possible_token_gives_an_empty_tree() -> None:
    def nothing(_tree: int, _path: Path) -> Tensor:
        return torch.full((VOCAB_SIZE,), -math.inf)

    (grown,) = grow(TreeShape(2, 2, 4), nothing, batch_size=1)
    assert len(grown) == 0


def test_growth_rows_see_their_ancestors_and_themselves() -> None:
    shape = TreeShape(4, 3, 30)
    growth = TreeGrowth(shape)
    generator = torch.Generator().manual_seed(0)
    growth.add(choose_children(torch.randn(2, 1, 9, generator=generator).log_softmax(-1), 3))
    parents: list[list[list[int]]] = []
    for level in range(3):
        beam = growth.select_beam()
        parents.append(beam.parents.tolist())
        assert beam.visible.shape == (2, 3, (level + 1) * 3)
        for tree, row in [(t, r) for t in range(2) for r in range(3)]:
            expected = {level * 3 + row}
            place = row
            for above in range(level, 0, -1):
                place = parents[above][tree][place]
                expected.add((above - 1) * 3 + place)
            seen = beam.visible[tree, row].nonzero().flatten().tolist()
            assert set(seen) == expected
        growth.add(choose_children(torch.randn(2, 3, 9, generator=generator).log_softmax(-1), 3))


def test_siblings_are_distinct_and_paths_unique() -> None:
    for grown in grow(TreeShape(5, 4, 20), smooth_scores, batch_size=3):
        paths = row_paths(grown)
        assert len(set(paths)) == len(paths) == 20
