"""A model of another family drafts as it would if it had its target's ids from the start."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.draft.drafters.model_factory import build_model, start_followers
from services.draft.sequence import DraftSequence, SequenceKey
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.tokens import SamplingParams, TokenTree, TreeShape
from shared.vocabulary_map import VocabularyMap, read_vocabulary_map
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.cut_drafts import CutDraft, check_trees, draft_settings
from tests.helpers.drafting import GREEDY, SAMPLED, propose
from tests.helpers.other_vocabularies import renumbered
from tests.helpers.standalone_drafts import standalone
from tests.helpers.twin_drafters import TwinDrafters

SIZE = 258
"""Bytes, and two special tokens."""
CUT = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.02, seed=5)
PENALISED = SamplingParams(
    temperature=0.7, seed=3, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={7: 5.0}
)
SHAPES = [TreeShape(4, 1, 5), TreeShape(3, 3, 9)]
CPU = torch.device("cpu")


def _shuffled(num_kept: int) -> list[int]:
    """Returns ids in a random order, the special ones among them."""
    order = [*range(num_kept - 2), SIZE - 2, SIZE - 1]
    random.Random(3).shuffle(order)
    return order


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its target's ids."""
    shape = TinyShape(vocab_size=SIZE, tie_word_embeddings=request.param)
    folder = tmp_path_factory.mktemp("own")
    return write_checkpoint(folder, "llama", shape, seed=3, with_tokenizer=True)


def _loaded(folder: Path, vocabulary: VocabularyMap | None = None, vocab_size: int = 0) -> Decoder:
    return load_decoder(
        folder, dtype=torch.float32, device=CPU, vocabulary=vocabulary, vocab_size=vocab_size
    )


def _map(folder: Path, target: Path) -> VocabularyMap:
    found = read_vocabulary_map(folder, target)
    assert found is not None
    return found


def _trees(decoder: Decoder, shape: TreeShape) -> list[TokenTree]:
    """Returns what is drafted level by level, and in one pass, for the same sequences."""
    samplings = (GREEDY, SAMPLED, CUT, PENALISED)
    batch = [_sequence(sampling, number) for number, sampling in enumerate(samplings)]
    drafter = standalone(decoder)
    for each in batch:
        drafter.open(each)
    twins = TwinDrafters.of_decoder(decoder)
    twins.open(*batch[:3])
    return [*propose(drafter, shape, *batch), *twins.trees(shape, *batch[:3])]


def _sequence(sampling: SamplingParams, number: int) -> DraftSequence:
    draw = random.Random(number)
    text = [draw.randrange(SIZE) for _ in range(9)]
    return DraftSequence(SequenceKey(1, number), text, len(text), sampling, 0, True, SIZE, 256)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_ids_make_no_difference(own: Path, tmp_path: Path, shape: TreeShape) -> None:
    other = renumbered(own, tmp_path / "other", _shuffled(SIZE))
    expected = _trees(_loaded(own), shape)
    right = _map(other, own)
    assert _trees(_loaded(other, right), shape) == expected
    wrong = replace(right, draft_ids=(*right.draft_ids[1:], right.draft_ids[0]))
    assert _trees(_loaded(other, wrong), shape) != expected, "the control: rows of other tokens"
    wrong = replace(right, pieces=(*right.pieces[1:], right.pieces[0]))
    assert _trees(_loaded(other, wrong), shape) != expected, "the control: other embeddings"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fewer_tokens_are_drafted_as_if_the_others_were_banned(
    own: Path, tmp_path: Path, shape: TreeShape
) -> None:
    order = _shuffled(100)
    other = renumbered(own, tmp_path / "other", order)
    decoder, whole = _loaded(other, _map(other, own), SIZE + 6), _loaded(own)
    kept = torch.tensor(sorted(order))
    assert decoder.config.vocab_size == len(decoder.embedding) == SIZE + 6
    assert decoder.num_proposed == len(order)
    assert torch.equal(decoder.embedding[kept], whole.embedding[kept])
    hidden = torch.randn(3, decoder.embedding.shape[1])
    logits, expected = decoder.logits(hidden), whole.logits(hidden)
    torch.testing.assert_close(logits[:, kept], expected[:, kept])
    assert int(logits.isinf().sum()) == 3 * (SIZE + 6 - len(order))
    drafted = {token for tree in _trees(decoder, shape) for token in tree.token_ids}
    assert drafted
    assert drafted <= set(order)


def test_a_token_that_the_draft_lacks_has_the_row_of_its_last_piece(
    own: Path, tmp_path: Path
) -> None:
    other = renumbered(own, tmp_path / "other", _shuffled(SIZE))
    right = _map(other, own)
    pieces = list(right.pieces)
    pieces[7], pieces[8] = (3, 9, 4), ()
    table = _loaded(other, replace(right, pieces=tuple(pieces))).embedding
    assert torch.equal(table[7], _loaded(other).embedding[4])
    assert not table[8].any()


@pytest.mark.parametrize("num_ids", [SIZE + 9, SIZE - 9])
def test_a_model_takes_the_ids_of_another_with_a_longer_or_shorter_table(
    own: Path, num_ids: int
) -> None:
    decoder, whole = _loaded(own, None, num_ids), _loaded(own)
    num_known = min(SIZE, num_ids)
    assert decoder.config.vocab_size == len(decoder.embedding) == num_ids
    assert torch.equal(decoder.embedding[:num_known], whole.embedding[:num_known])
    assert not decoder.embedding[num_known:].any()
    hidden = torch.randn(3, decoder.embedding.shape[1])
    logits, expected = decoder.logits(hidden), whole.logits(hidden)
    torch.testing.assert_close(logits[:, :num_known], expected[:, :num_known])
    assert logits[:, num_known:].isneginf().all()


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CutDraft]:
    """A model of another family, whole and cut in two."""
    folder = tmp_path_factory.mktemp("cut")
    shape = TinyShape(vocab_size=SIZE)
    own = write_checkpoint(folder / "own", "llama", shape, seed=3, with_tokenizer=True)
    other = renumbered(own, folder / "other", _shuffled(120))
    whole, parts = (replace(draft_settings(other, "cpu", size), tokenizer=own) for size in (1, 2))
    followers = start_followers(parts)
    try:
        built = build_model(parts, followers.group, followers.leader)
        yield CutDraft(build_model(whole), built, followers)
    finally:
        followers.stop()


@pytest.mark.parametrize("grows_whole", [True, False], ids=["kinds", "requests"])
def test_two_processes_grow_the_trees_of_one(cut: CutDraft, *, grows_whole: bool) -> None:
    assert cut.cut.runner.decoder.num_proposed == 120
    check_trees(cut.twins(grows_whole=grows_whole), SHAPES[1])
