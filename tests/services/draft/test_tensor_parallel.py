"""A draft whose model is held by two processes proposes the trees of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.draft.drafters.model_factory import start_followers
from shared.errors import SettingsError
from shared.runtime.lockstep import Leader, TreeLeader
from shared.runtime.tree_draft import PackedTrees
from shared.runtime.tree_pass import OpenSequence
from shared.tokens import SamplingParams, TokenTree, TreeShape
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.cut_drafts import CutDraft, check_ahead, check_trees, cut_draft, draft_settings
from tests.helpers.drafting import GREEDY, VOCAB_SIZE
from tests.helpers.twin_drafters import SAMPLINGS

SHAPES = [TreeShape(4, 1, 5), TreeShape(3, 3, 9), TreeShape(2, 16, 257)]
TREE = SHAPES[1]
PENALISED = SamplingParams(temperature=0.7, seed=3, presence_penalty=0.5, logit_bias={4: 2.0})


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CutDraft]:
    with cut_draft(tmp_path_factory.mktemp("draft"), "cpu") as draft:
        yield draft


def test_each_process_holds_a_part(draft: CutDraft) -> None:
    whole, cut = (each.runner.decoder for each in (draft.whole, draft.cut))
    assert len(cut.embedding) == len(whole.embedding) // 2
    many, few = (each.layers[0].attention.shape for each in (whole, cut))
    assert (few.num_heads, few.num_kv_heads) == (many.num_heads // 2, many.num_kv_heads // 2)
    assert draft.cut.runner.pool.num_pages == draft.whole.runner.pool.num_pages


@pytest.mark.parametrize("grows_whole", [True, False], ids=["kinds", "requests"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_processes_grow_the_trees_of_one(
    draft: CutDraft, shape: TreeShape, grows_whole: bool
) -> None:
    samplings = SAMPLINGS if grows_whole else [PENALISED, *SAMPLINGS]
    check_trees(draft.twins(grows_whole=grows_whole), shape, samplings)


def test_two_processes_draft_ahead_what_one_drafts_afterwards(draft: CutDraft) -> None:
    check_ahead(draft.twins(), TREE)


def test_two_processes_walk_a_tree_as_one_does(draft: CutDraft) -> None:
    """What may follow the nodes of a tree that comes from elsewhere."""
    tree = TokenTree((5, 9, 7, 5), (None, None, 0, 2), (-1.0, -2.0, -1.0, -1.0))
    sequence = OpenSequence((3, 4), 0, -1, GREEDY, range(1, 9))
    found = []
    for built in (draft.whole, draft.cut):
        assert built.grower is not None
        [walked] = built.grower.walk([sequence], (), [tree], TREE, num_choices=4)
        num_rows = 1 + sum(len(tokens) for tokens, _ in walked.levels)
        found.append([walked.rows.after(row) for row in range(num_rows)])
    for row, expected in zip(*found, strict=True):
        assert [token for token, _ in row] == [token for token, _ in expected]
        assert [score for _, score in row] == pytest.approx([score for _, score in expected])


class _Silent:
    """A pipe that nobody reads."""

    def send(self, message: object) -> None:
        pass

    def recv(self) -> object:
        raise EOFError


def test_a_pass_that_was_given_up_is_not_continued(draft: CutDraft) -> None:
    leader = TreeLeader(Leader(draft.followers.group, [_Silent()]))
    first = leader.announced(iter([PackedTrees(torch.zeros(1))] * 2))
    next(first)
    leader.announced(iter(()))
    with pytest.raises(AssertionError, match="another pass has taken its place"):
        next(first)


def test_a_size_that_does_not_fit_is_refused_before_processes_start(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shape=TinyShape(vocab_size=VOCAB_SIZE))
    with pytest.raises(SettingsError, match="--tp-size is 3; the model's num_attention_heads, 4"):
        start_followers(draft_settings(tmp_path, "cpu", 3))
