"""The same language model as a draft in one process and split over two."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.draft.drafters.model_factory import BuiltModel, build_model, start_followers
from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.settings import DraftSettings
from services.followers import Followers
from shared.kv.leases import KvLeases
from shared.model_options import Dtype
from shared.tokens import SamplingParams, TreeShape
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


@dataclass
class CutDraft:
    """A model in one process, and the same model split over two."""

    whole: BuiltModel
    cut: BuiltModel
    followers: Followers

    def twins(self, *, grows_whole: bool = True) -> TwinDrafters:
        """Returns drafters with empty pages, of the split model and of the whole one."""
        return TwinDrafters(
            self.cut.grower,  # type: ignore[arg-type]
            _drafter(self.cut),
            _drafter(self.whole),
            grows_whole=grows_whole,
        )


@contextmanager
def cut_draft(folder: Path, device: str) -> Iterator[CutDraft]:
    """Writes a tiny model to `folder` and loads it."""
    write_checkpoint(folder, shape=TinyShape(vocab_size=VOCAB_SIZE))
    settings = draft_settings(folder, device, 2)
    followers = start_followers(settings)
    try:
        cut = build_model(settings, followers.group, followers.leader)
        yield CutDraft(build_model(draft_settings(folder, device, 1)), cut, followers)
    finally:
        followers.stop()


def draft_settings(folder: Path, device: str, tp_size: int) -> DraftSettings:
    return DraftSettings(
        speculative_draft_model_path=folder,
        device=device,
        dtype=Dtype.FLOAT32,
        tp_size=tp_size,
        page_size=PAGE_SIZE,
        context_length=CONTEXT,
        max_total_tokens=NUM_PAGES * PAGE_SIZE,
        max_running_requests=MAX_SEQUENCES,
    )


def check_trees(
    twins: TwinDrafters, shape: TreeShape, samplings: Sequence[SamplingParams] = SAMPLINGS
) -> None:
    """Checks trees of several sequences, greedy and sampled, while accepted rows move and context
    windows slide.

    Args:
        samplings: of the sequences in turn; for passes by kernels, without truncated sampling.
    """
    draw = random.Random(str(shape))
    batch = [
        draft_sequence(text(draw, length), samplings[number % len(samplings)], number)
        for number, length in enumerate((1, 8, 13, 61))
    ]
    twins.open(*batch)
    assert twins.rounds(shape, 4, draw, *batch) > 0
    for sequence in batch:
        twins.close(sequence)


def check_ahead(twins: TwinDrafters, shape: TreeShape) -> None:
    """Checks drafting ahead in passes that stop after each level, with other passes in between."""
    draw = random.Random(4)
    batch = [
        draft_sequence(text(draw, length), SAMPLINGS[number], number)
        for number, length in enumerate((5, 18))
    ]
    twins.open(*batch)
    lookahead = twins.whole.lookahead
    assert lookahead is not None
    lookahead.budget = 3
    trees = twins.trees(shape, *batch)
    for _ in range(3):
        prepared = prepare_ahead(twins.whole, shape, *zip(batch, trees, strict=True))
        for place, sequence in enumerate(batch):
            hit = draw.choice([proposal for proposal in prepared if proposal.sequence is sequence])
            twins.commit(sequence, foreseen_tokens(trees[place], hit), is_late=False)
            [expected] = propose(twins.scored, shape, sequence)
            assert path_values(hit.tree) == pytest.approx(path_values(expected), abs=1e-3)
            trees[place] = hit.tree
    for sequence in batch:
        twins.close(sequence)


def _drafter(built: BuiltModel) -> StandaloneDrafter:
    return StandaloneDrafter(
        built.runner,
        KvLeases(built.runner.pool.num_pages, PAGE_SIZE),
        built.grower,
        max_context_tokens=built.max_context_tokens,
    )
