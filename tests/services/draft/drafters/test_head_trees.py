"""Trees scored as kinds of sampling against those scored as requests, over the same sequences."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from shared.layers.linear import Linear
from shared.models.heads.head import DraftHead
from shared.tokens import SamplingParams, TreeShape
from tests.helpers.drafting import GREEDY, draft_sequence
from tests.helpers.twin_drafters import (
    CONTEXT,
    HEADS,
    SAMPLED,
    SAMPLINGS,
    SHAPES,
    TwinDrafters,
    load_heads,
    text,
)

TREE = TreeShape(3, 3, 9)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DraftHead]:
    return load_heads(tmp_path_factory, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        # Each head with every other shape, each shape with every other head.
        (name, shape)
        for number, name in enumerate(HEADS)
        for shape in SHAPES[number % 2 :: 2]
    ],
)
def test_kinds_of_sampling_score_as_requests_do(
    heads: dict[str, DraftHead], name: str, shape: TreeShape
) -> None:
    draw, twins = random.Random(f"{name} {shape}"), TwinDrafters.of_head(heads[name])
    # Lengths around the edges of pages; more sequences than one pass takes.
    batch = [
        draft_sequence(text(draw, length), SAMPLINGS[number % 4], number)
        for number, length in enumerate((2, 7, 8, 13, 31))
    ]
    twins.open(*batch)
    twins.send_all(*batch)
    assert twins.rounds(shape, 4, draw, *batch) > 0
    assert twins.grower.num_sequences == 4 * len(batch)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_scores_are_ordered_alike(heads: dict[str, DraftHead], shape: TreeShape) -> None:
    head = heads["eagle3"]
    weight = torch.zeros(head.vocabulary.size, head.embedding.shape[1])
    vocabulary = replace(head.vocabulary, lm_head=Linear.of(weight))
    twins = TwinDrafters.of_head(replace(head, vocabulary=vocabulary), is_exact=True)
    batch = [draft_sequence(range(5, 12), SAMPLINGS[number], number) for number in range(2)]
    twins.open(*batch)
    twins.send_all(*batch)
    assert twins.rounds(shape, 2, random.Random(1), *batch) > 0


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_rows_of_any_number_and_order_come_to_the_same_trees(
    heads: dict[str, DraftHead], name: str
) -> None:
    """Late features, verdicts on other trees, windows that slide, sequences that close and open
    again, and shapes that change from round to round."""
    draw, twins = random.Random(name), TwinDrafters.of_head(heads[name])
    batch = [
        draft_sequence(text(draw, draw.randint(2, 40)), SAMPLINGS[number], number)
        for number in range(4)
    ]
    sent = [0] * len(batch)
    twins.open(*batch)
    num_trees = num_windows = 0
    for _ in range(24):
        for number, sequence in enumerate(batch):
            end = sequence.num_tokens - 1 - draw.choice([0, 0, 0, 1, 2])
            if end > sent[number]:
                twins.send(sequence, sent[number], end)
                sent[number] = end
        trees = twins.trees(draw.choice(SHAPES), *draw.sample(batch, draw.randint(1, 4)))
        num_trees += sum(len(tree) > 0 for tree in trees)
        for number, sequence in enumerate(batch):
            twins.commit(sequence, text(draw, draw.choice([1, 2, 3, 9])), is_late=True)
            if draw.random() < 0.1:
                twins.close(sequence)
                twins.open(sequence)
                # The target sends again what the draft has not kept, all or the newest.
                sent[number] = draw.choice([0, max(sequence.num_tokens - 12, 0)])
            num_windows += sequence.num_tokens > CONTEXT
    assert twins.grower.num_sequences == num_trees > 30
    assert num_windows > 10


@pytest.mark.parametrize(
    ("sampling", "mirrors_noise", "draws_chains", "num_whole"),
    [
        (SamplingParams(temperature=0.9, presence_penalty=0.5), True, False, 2),
        (SamplingParams(temperature=0.0, logit_bias={3: 50.0}), True, False, 2),
        (SAMPLED, False, False, 2),
        (GREEDY, False, True, 2),
        (GREEDY, False, False, 3),
        (SAMPLED, True, False, 3),
        (replace(SAMPLED, top_k=2), True, False, 2),
        (replace(SAMPLED, top_p=0.1), True, False, 2),
        (replace(SAMPLED, min_p=0.9), True, False, 2),
        (replace(GREEDY, top_p=0.1), True, False, 3),
    ],
)
def test_requests_of_every_kind_share_a_batch(
    heads: dict[str, DraftHead],
    sampling: SamplingParams,
    mirrors_noise: bool,
    draws_chains: bool,
    num_whole: int,
) -> None:
    draw, twins = random.Random(3), TwinDrafters.of_head(heads["eagle3"])
    batch = [draft_sequence(text(draw, 9), SAMPLINGS[number], number) for number in range(3)]
    batch[1] = replace(
        batch[1], sampling=sampling, mirrors_noise=mirrors_noise, draws_chains=draws_chains
    )
    twins.open(*batch)
    twins.send_all(*batch)
    first, changed, last = twins.trees(TREE, *batch)
    assert len(first) == len(last) == 8
    assert 1 <= len(changed) <= 8
    assert twins.grower.num_sequences == num_whole


def test_where_the_target_has_one_token_to_draw_trees_are_greedy(
    heads: dict[str, DraftHead],
) -> None:
    draw, trees = random.Random(6), []
    tokens = text(draw, 9)
    for sampling in (GREEDY, replace(SAMPLED, top_k=1)):
        twins, sequence = TwinDrafters.of_head(heads["eagle3"]), draft_sequence(tokens, sampling)
        twins.open(sequence)
        twins.send_all(sequence)
        assert twins.whole.reserve(sequence, TREE)
        [proposal] = twins.whole.propose([sequence], TREE)
        assert twins.grower.num_sequences == 1
        trees.append(proposal.tree)
    assert trees[0] == trees[1]


def test_a_tree_of_a_probes_own_shape_needs_no_graph(heads: dict[str, DraftHead]) -> None:
    twins = TwinDrafters.of_head(heads["eagle3"])
    probe = replace(draft_sequence(text(random.Random(4), 9)), shape=TREE, is_probe=True)
    twins.open(probe)
    twins.send_all(probe)
    assert all(twins.trees(TREE, probe))
    assert twins.grower.num_sequences == 0
    assert not twins.grower._passes
