"""Trees grown in one pass by Triton's kernels, as CUDA graphs where there is CUDA."""

from __future__ import annotations

import itertools
import logging
import random

import pytest
import torch

from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.models.decoder import Decoder
from shared.models.heads.head import DraftHead
from shared.models.loader import load_decoder
from shared.runtime import tree_pass
from shared.tokens import TreeShape
from shared.vocabulary_map import VocabularyMap
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.drafting import (
    GREEDY,
    VOCAB_SIZE,
    draft_sequence,
    foreseen_tokens,
    prepare_ahead,
    propose,
)
from tests.helpers.head_oracle import Behind, best_paths, path_values
from tests.helpers.kernel_device import kernel_device, some_interpreted
from tests.helpers.twin_drafters import (
    MAX_SEQUENCES,
    SAMPLED,
    OwnPaths,
    TwinDrafters,
    load_heads,
    text,
)

pytestmark = pytest.mark.gpu
SHAPES = [TreeShape(1, 1, 2), TreeShape(4, 1, 5), TreeShape(3, 3, 9), TreeShape(2, 4, 30)]
SMALL = TreeShape(2, 2, 5)  # the interpreter takes its time
if IS_INTERPRETING:
    SHAPES.append(SMALL)
INTERPRETED = [("mapped", SHAPES[3]), ("eagle3", SMALL), ("eagle3.1", SHAPES[1])]
WALKED = [("eagle3", SMALL)]
on_cuda = pytest.mark.skipif(IS_INTERPRETING, reason="graphs need CUDA")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DraftHead]:
    return load_heads(tmp_path_factory, kernel_device(), ["mapped", "eagle3", "eagle3.1"])


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    # Two layers have caches of their own as three have, and the interpreter takes its time.
    num_layers = 2 if IS_INTERPRETING else 3
    shape = TinyShape(vocab_size=VOCAB_SIZE, num_layers=num_layers, max_position_embeddings=128)
    folder = write_checkpoint(tmp_path_factory.mktemp("draft"), shape=shape)
    return load_decoder(folder, dtype=torch.float32, device=kernel_device())


@pytest.fixture(scope="module")
def other_decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A model of another family, which has half of its target's tokens."""
    shape = TinyShape(vocab_size=40, num_layers=1, max_position_embeddings=128)
    folder = write_checkpoint(tmp_path_factory.mktemp("other"), shape=shape)
    draw = random.Random(2)
    draft_ids = draw.sample(range(40), VOCAB_SIZE // 2)
    target_ids = sorted(draw.sample(range(VOCAB_SIZE), VOCAB_SIZE // 2))
    known = dict(zip(target_ids, draft_ids, strict=True))
    pieces = tuple((known.get(token_id, draft_ids[0]),) for token_id in range(VOCAB_SIZE))
    vocabulary = VocabularyMap(pieces, tuple(draft_ids), tuple(target_ids), VOCAB_SIZE)
    return load_decoder(folder, dtype=torch.float32, device=kernel_device(), vocabulary=vocabulary)


def _twins(head: DraftHead) -> TwinDrafters:
    return TwinDrafters.of_head(head, has_graphs=not IS_INTERPRETING)


@pytest.mark.parametrize(
    ("name", "shape"),
    some_interpreted(itertools.product(["mapped", "eagle3", "eagle3.1"], SHAPES), INTERPRETED),
    ids=str,
)
def test_kinds_of_sampling_score_as_requests_do(
    heads: dict[str, DraftHead], name: str, shape: TreeShape
) -> None:
    draw, twins = random.Random(f"{name} {shape}"), _twins(heads[name])
    batch = [
        draft_sequence(text(draw, length), sampling, number)
        for number, (length, sampling) in enumerate([(2, GREEDY), (8, SAMPLED), (21, GREEDY)])
    ]
    twins.open(*batch)
    twins.send_all(*batch)
    num_rounds = 1 if IS_INTERPRETING else 2
    assert twins.rounds(shape, num_rounds, draw, *batch) > 0
    assert twins.grower.num_sequences == num_rounds * len(batch)


@pytest.mark.parametrize(
    "shape",
    some_interpreted(SHAPES, [SHAPES[3]]),
    ids=str,
)
def test_a_language_models_trees_score_as_requests_do(decoder: Decoder, shape: TreeShape) -> None:
    draw = random.Random(str(shape))
    twins = TwinDrafters.of_decoder(decoder, has_graphs=not IS_INTERPRETING)
    batch = [
        draft_sequence(text(draw, length), sampling, number)
        for number, (length, sampling) in enumerate([(1, GREEDY), (8, SAMPLED), (21, GREEDY)])
    ]
    twins.open(*batch)
    num_rounds = 1 if IS_INTERPRETING else 3
    assert twins.rounds(shape, num_rounds, draw, *batch) > 0
    assert twins.grower.num_sequences == num_rounds * len(batch)


@pytest.mark.parametrize(
    "shape",
    some_interpreted(SHAPES, [SHAPES[1]]),
    ids=str,
)
def test_a_model_of_another_family_grows_trees_of_the_targets_tokens(
    other_decoder: Decoder, shape: TreeShape
) -> None:
    draw = random.Random(str(shape))
    twins = TwinDrafters.of_decoder(other_decoder, has_graphs=not IS_INTERPRETING)
    batch = [
        draft_sequence(text(draw, length), sampling, number)
        for number, (length, sampling) in enumerate([(8, SAMPLED), (5, GREEDY)])
    ]
    twins.open(*batch)
    known = set(other_decoder.token_map.tolist())  # type: ignore[union-attr]
    assert all(set(tree.token_ids) <= known for tree in twins.trees(shape, *batch))
    assert twins.rounds(shape, 1, draw, *batch) > 0


@pytest.mark.parametrize(
    "shape",
    some_interpreted(SHAPES, [SMALL]),
    ids=str,
)
def test_trees_for_verdicts_are_those_grown_after_them(decoder: Decoder, shape: TreeShape) -> None:
    draw = random.Random(str(shape))
    twins = TwinDrafters.of_decoder(decoder, has_graphs=not IS_INTERPRETING)
    batch = [
        draft_sequence(text(draw, length), sampling, number)
        for number, (length, sampling) in enumerate([(5, GREEDY), (18, SAMPLED)])
    ]
    twins.open(*batch)
    lookahead = twins.whole.lookahead
    assert lookahead is not None
    lookahead.budget = 3
    trees = twins.trees(shape, *batch)
    for _ in range(1 if IS_INTERPRETING else 3):
        prepared = prepare_ahead(twins.whole, shape, *zip(batch, trees, strict=True))
        for place, sequence in enumerate(batch):
            fallen = draw.choice([each for each in prepared if each.sequence is sequence])
            twins.commit(sequence, foreseen_tokens(trees[place], fallen), is_late=False)
            [expected] = propose(twins.scored, shape, sequence)
            assert path_values(fallen.tree) == pytest.approx(path_values(expected), abs=1e-3)
            trees[place] = fallen.tree


@pytest.mark.parametrize(
    ("name", "shape"),
    some_interpreted(itertools.product(["mapped", "eagle3", "eagle3.1"], SHAPES), WALKED),
    ids=str,
)
def test_heads_prepare_for_verdicts_by_the_states_of_the_path_to_them(
    heads: dict[str, DraftHead], name: str, shape: TreeShape
) -> None:
    """Branches behind trees that were grown, then behind trees that are walked."""
    draw, twins, own = random.Random(f"{name} {shape}"), _twins(heads[name]), OwnPaths(heads[name])
    batch = [
        draft_sequence(text(draw, length), sampling, number)
        for number, (length, sampling) in enumerate([(5, GREEDY), (18, SAMPLED)])
    ]
    twins.open(*batch)
    twins.send_all(*batch)
    twins.whole.lookahead.budget = 3
    trees = twins.trees(shape, *batch)
    for _ in range(2 if IS_INTERPRETING else 4):
        prepared = prepare_ahead(twins.whole, shape, *zip(batch, trees, strict=True))
        for place, sequence in enumerate(batch):
            found = [each for each in prepared if each.sequence is sequence]
            rows = twins.features(sequence, 0, sequence.num_tokens - 1).rows
            for each in found:
                supposed = foreseen_tokens(trees[place], each)
                tokens, oracle = [*sequence.token_ids, *supposed], Behind(own, len(supposed))
                values = best_paths(oracle, tokens, rows, sequence.sampling, shape)
                assert path_values(each.tree) == pytest.approx(values, abs=1e-3, rel=1e-3)
            fallen = draw.choice(found)
            twins.commit(sequence, foreseen_tokens(trees[place], fallen), is_late=False)
            trees[place] = fallen.tree


@on_cuda
def test_batches_of_every_size_come_to_the_same_trees(heads: dict[str, DraftHead]) -> None:
    """Windows that slide, greedy and drawn rows, and graphs of every number of slots in turn."""
    draw, twins = random.Random(5), _twins(heads["eagle3"])
    batch = [
        draft_sequence(text(draw, 20 + number), [GREEDY, SAMPLED][number % 2], number)
        for number in range(5)
    ]
    twins.open(*batch)
    twins.send_all(*batch)
    for turn in range(24):
        for sequence in batch:
            twins.commit(sequence, text(draw, draw.choice([1, 3, 9])), is_late=False)
        some = draw.sample(batch, draw.randint(1, 5))
        assert all(twins.trees(SHAPES[turn % len(SHAPES)], *some))
    assert max(sequence.num_tokens for sequence in batch) > 96


# torch says of the mode itself that it is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@on_cuda
def test_a_launch_waits_for_nothing(heads: dict[str, DraftHead]) -> None:
    draw, twins = random.Random(6), _twins(heads["eagle3"])
    batch = [draft_sequence(text(draw, 9), GREEDY, number) for number in range(MAX_SEQUENCES)]
    twins.open(*batch)
    twins.send_all(*batch)
    shape = SHAPES[2]
    twins.rounds(shape, 1, draw, *batch)
    assert all(twins.whole.reserve(each, shape) for each in batch)
    most = twins.grower.max_open_rows(shape)
    rows, features = twins.whole._contexts.open_pass(batch, most)
    try:
        torch.cuda.set_sync_debug_mode("error")
        growing = twins.grower.begin(rows, features, shape)
        growing.queue()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(each.tree.token_ids for each in growing.read())


@on_cuda
def test_graphs_captured_ahead_are_those_that_batches_need(
    heads: dict[str, DraftHead], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    draw, twins = random.Random(8), _twins(heads["eagle3"])
    batch = [
        draft_sequence(text(draw, 9), [GREEDY, SAMPLED][number % 2], number)
        for number in range(MAX_SEQUENCES)
    ]
    twins.open(*batch)
    twins.send_all(*batch)
    for sequence in batch[:2]:
        twins.rounds(SHAPES[2], 1, draw, sequence)
    while twins.grower.capture_next(SHAPES[2]):
        pass
    monkeypatch.setattr(tree_pass, "capturing", fail)
    with caplog.at_level(logging.WARNING):
        for count in range(1, MAX_SEQUENCES + 1):
            assert twins.rounds(SHAPES[2], 1, draw, *batch[:count]) > 0
            assert twins.rounds(SHAPES[2], 1, draw, *batch[:count:2]) > 0
    assert not [each for each in caplog.records if "no CUDA graph" in each.message]


@on_cuda
def test_without_memory_for_a_graph_trees_grow_as_they_are(
    heads: dict[str, DraftHead], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(tree_pass, "capturing", fail)
    draw, twins = random.Random(7), _twins(heads["eagle3"])
    sequence = draft_sequence(text(draw, 9))
    twins.open(sequence)
    twins.send_all(sequence)
    with caplog.at_level(logging.WARNING):
        assert twins.rounds(SHAPES[2], 3, draw, sequence) > 0
    [record] = [each for each in caplog.records if "no CUDA graph" in each.message]
    assert "no memory is left" in record.message
