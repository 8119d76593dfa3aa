"""A language model's trees scored as kinds of sampling against those scored as requests."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from services.draft.drafters.drafter import VerifiedTree
from services.draft.drafters.standalone import StandaloneDrafter
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.tokens import SamplingParams, TreeShape
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.drafting import GREEDY, VOCAB_SIZE, draft_sequence
from tests.helpers.twin_drafters import CONTEXT, SAMPLED, SAMPLINGS, SHAPES, TwinDrafters, text

TREE = TreeShape(3, 3, 9)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    shape = TinyShape(vocab_size=VOCAB_SIZE, max_position_embeddings=128)
    folder = write_checkpoint(tmp_path_factory.mktemp("draft"), shape=shape)
    return load_decoder(folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kinds_of_sampling_score_as_requests_do(decoder: Decoder, shape: TreeShape) -> None:
    """Accepted rows stay where a pass left them, or move to the front."""
    draw, twins = random.Random(str(shape)), TwinDrafters.of_decoder(decoder)
    batch = [
        draft_sequence(text(draw, length), SAMPLINGS[number % 4], number)
        for number, length in enumerate((1, 7, 8, 13, 31))
    ]
    twins.open(*batch)
    assert twins.rounds(shape, 5, draw, *batch) > 0
    assert twins.grower.num_sequences == 5 * len(batch)


def test_rows_of_any_number_and_order_come_to_the_same_trees(decoder: Decoder) -> None:
    """Verdicts on other trees, windows that slide, sequences that close and open again, and shapes
    that change from round to round."""
    draw, twins = random.Random(8), TwinDrafters.of_decoder(decoder)
    batch = [
        draft_sequence(text(draw, draw.randint(1, 40)), SAMPLINGS[number], number)
        for number in range(4)
    ]
    twins.open(*batch)
    num_windows = 0
    for _ in range(20):
        some = draw.sample(batch, draw.randint(1, 4))
        assert all(twins.trees(draw.choice(SHAPES), *some))
        for sequence in batch:
            twins.commit(sequence, text(draw, draw.choice([1, 2, 3, 9])), is_late=True)
            if draw.random() < 0.1:
                twins.close(sequence)
                twins.open(sequence)
            num_windows += sequence.num_tokens > CONTEXT
    assert num_windows > 10


@pytest.mark.parametrize(
    ("change", "num_whole"),
    [
        ({"sampling": SamplingParams(temperature=0.9, presence_penalty=0.5)}, 2),
        ({"sampling": SAMPLED, "mirrors_noise": False}, 2),
        ({"sampling": GREEDY, "mirrors_noise": False}, 3),
    ],
    ids=["penalties", "point mass", "greedy point mass"],
)
def test_requests_of_every_kind_share_a_batch(
    decoder: Decoder, change: dict[str, object], num_whole: int
) -> None:
    draw, twins = random.Random(3), TwinDrafters.of_decoder(decoder)
    batch = [draft_sequence(text(draw, 9), SAMPLINGS[number], number) for number in range(3)]
    batch[1] = replace(batch[1], **change)
    twins.open(*batch)
    assert twins.rounds(TREE, 3, draw, *batch) == 3 * 3 * 8
    assert twins.grower.num_sequences == 3 * num_whole


def test_drafting_ahead_grows_trees_of_all_verdicts_in_one_pass(decoder: Decoder) -> None:
    twins = TwinDrafters.of_decoder(decoder)
    batch = [draft_sequence(text(random.Random(4), 9), GREEDY, number) for number in range(2)]
    twins.open(*batch)
    lookahead = twins.whole.lookahead
    assert lookahead is not None
    lookahead.budget = 1
    trees = twins.trees(TREE, *batch)
    assert twins.grower.num_sequences == 2
    for sequence, tree in zip(batch, trees, strict=True):
        lookahead.begin(VerifiedTree(sequence, tree, TREE, 1))
    found = []
    while lookahead.has_work:
        found.append(len(lookahead.advance()))
    # The pass stops after each level; that of the leaves comes when the trees are out.
    assert found[: TREE.num_steps + 1] == [0] * (TREE.num_steps - 1) + [2, 0]
    assert sum(found) == 2


def test_what_a_sequence_goes_on_in_is_computed_whole_where_memory_gets_short(
    decoder: Decoder,
) -> None:
    """A pass may be at its leaves yet when the verdict falls that one of its trees is for."""
    chain, twins = TreeShape(3, 1, 4), TwinDrafters.of_decoder(decoder)
    sequence = draft_sequence(text(random.Random(4), 9), GREEDY, 1)
    twins.open(sequence)
    assert isinstance(twins.whole, StandaloneDrafter)
    branches = twins.whole._branches
    assert branches is not None
    branches.budget = 3
    [tree] = twins.trees(chain, sequence)
    branches.begin(VerifiedTree(sequence, tree, chain, 3))
    assert branches.advance() == []
    under_way = branches._passes.under_way
    assert under_way is not None
    twins.commit(sequence, under_way.branches[0].request.path, is_late=False)
    grown = [each for _ in range(chain.num_steps - 1) for each in branches.advance()]
    [late] = [each.tree for each in grown if each.condition is None]
    branches.make_room()
    assert len(late) == chain.num_steps
    twins.commit(sequence, [*late.token_ids, 5], is_late=False)
    twins.trees(chain, sequence)
