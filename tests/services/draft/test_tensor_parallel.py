"""A draft whose model is held by two processes proposes the trees of one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.drafters.standalone_factory import BuiltModel, build_model
from services.draft.settings import DraftSettings
from services.draft.tensor_parallel import start_followers
from services.followers import Followers
from shared.errors import SettingsError
from shared.kv.leases import KvLeases
from shared.runtime.lockstep import Leader
from shared.runtime.tree_lockstep import TreeLeader
from shared.tokens import TreeShape
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.drafting import (
    VOCAB_SIZE,
    draft_sequence,
    foreseen_tokens,
    prepare_ahead,
    propose,
)
from tests.helpers.head_oracle import path_values
from tests.helpers.twin_drafters import (
    CONTEXT,
    MAX_SEQUENCES,
    NUM_PAGES,
    PAGE_SIZE,
    SAMPLINGS,
    TwinDrafters,
    text,
)

SHAPES = [TreeShape(4, 1, 5), TreeShape(3, 3, 9), TreeShape(2, 16, 257)]
TREE = SHAPES[1]


def _settings(folder: Path, tp_size: int, **changes: object) -> DraftSettings:
    return DraftSettings(
        speculative_draft_model_path=folder,
        device="cpu",
        tp_size=tp_size,
        page_size=PAGE_SIZE,
        context_length=CONTEXT,
        max_total_tokens=NUM_PAGES * PAGE_SIZE,
        max_running_requests=MAX_SEQUENCES,
        **changes,  # type: ignore[arg-type]
    )


@dataclass
class Pair:
    """The same model, whole and cut in two."""

    whole: BuiltModel
    cut: BuiltModel
    followers: Followers

    def twins(self, *, grows_whole: bool = True) -> TwinDrafters:
        """Returns drafters with empty pages: the cut one grows whole trees in a pass, unless told
        otherwise, the whole one level by level."""
        grower = self.cut.grower
        assert grower is not None
        return TwinDrafters(
            grower,  # type: ignore[arg-type]
            _drafter(self.cut, grows_whole=grows_whole),
            _drafter(self.whole, grows_whole=False),
        )


def _drafter(built: BuiltModel, *, grows_whole: bool) -> StandaloneDrafter:
    return StandaloneDrafter(
        built.runner,
        KvLeases(built.runner.pool.num_pages, PAGE_SIZE),
        max_context_tokens=built.max_context_tokens,
        grower=built.grower if grows_whole else None,
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    shape = TinyShape(vocab_size=VOCAB_SIZE)
    folder = write_checkpoint(tmp_path_factory.mktemp("draft"), shape=shape)
    settings = _settings(folder, 2)
    followers = start_followers(settings)
    try:
        cut = build_model(settings, followers.group, followers.leader)
        yield Pair(build_model(_settings(folder, 1)), cut, followers)
    finally:
        followers.stop()


def test_each_process_holds_a_part(pair: Pair) -> None:
    whole, cut = (each.runner.decoder for each in (pair.whole, pair.cut))
    assert len(cut.embedding) == len(whole.embedding) // 2
    many, few = (each.layers[0].attention.shape for each in (whole, cut))
    assert (few.num_heads, few.num_kv_heads) == (many.num_heads // 2, many.num_kv_heads // 2)
    assert pair.cut.runner.pool.num_pages == pair.whole.runner.pool.num_pages


@pytest.mark.parametrize("grows_whole", [True, False], ids=["pass", "levels"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_processes_grow_the_trees_of_one(
    pair: Pair, shape: TreeShape, grows_whole: bool
) -> None:
    """Of several sequences, greedy and drawn, whose accepted rows move and whose windows slide."""
    draw, twins = random.Random(str(shape)), pair.twins(grows_whole=grows_whole)
    batch = [
        draft_sequence(text(draw, length), SAMPLINGS[number % 4], number)
        for number, length in enumerate((1, 8, 13, 61))
    ]
    twins.open(*batch)
    assert twins.rounds(shape, 4, draw, *batch) > 0
    for sequence in batch:
        twins.close(sequence)


def test_two_processes_draft_ahead_what_one_drafts_afterwards(pair: Pair) -> None:
    """Passes that stop after each level, with other passes in between."""
    draw, twins = random.Random(4), pair.twins()
    batch = [
        draft_sequence(text(draw, length), SAMPLINGS[number], number)
        for number, length in enumerate((5, 18))
    ]
    twins.open(*batch)
    foresight = twins.whole.foresight
    assert foresight is not None
    foresight.budget = 3
    trees = twins.trees(TREE, *batch)
    for _ in range(3):
        prepared = prepare_ahead(twins.whole, TREE, *zip(batch, trees, strict=True))
        for place, sequence in enumerate(batch):
            fallen = draw.choice([each for each in prepared if each.sequence is sequence])
            twins.commit(sequence, foreseen_tokens(trees[place], fallen), is_late=False)
            [expected] = propose(twins.levels, TREE, sequence)
            assert path_values(fallen.tree) == pytest.approx(path_values(expected), abs=1e-3)
            trees[place] = fallen.tree


def test_a_pass_that_was_given_up_is_not_continued(pair: Pair) -> None:
    class Silent:
        def send(self, message: object) -> None:
            pass

        def recv(self) -> object:
            raise EOFError

    leader = TreeLeader(Leader(pair.followers.group, [Silent()]))
    leader.begin((), TREE, 0)
    first = leader.announced(part for part in [torch.zeros(1)] * 2)  # type: ignore[arg-type]
    next(first)
    leader.begin((), TREE, 0)
    with pytest.raises(AssertionError, match="another pass has taken its place"):
        next(first)


def test_a_size_that_does_not_fit_is_refused_before_processes_start(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shape=TinyShape(vocab_size=VOCAB_SIZE))
    with pytest.raises(SettingsError, match="--tp-size is 3; the model's num_attention_heads, 4"):
        start_followers(_settings(folder, 3))
