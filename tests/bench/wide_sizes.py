"""Sizes that a pair of processes is widened to, and the folders that describe them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.draft.algorithm import Algorithm
from tests.bench.wide_folders import is_written
from tests.bench.wide_head import WideHead, WideHeadShape
from tests.bench.wide_loading import describe
from tests.bench.wide_model import SHAPE_1B, SHAPE_8B, SHAPE_32B, SHAPE_70B, WideModel, WideShape


@dataclass(frozen=True, slots=True)
class PairSize:
    """How wide a target, and a draft for it, become.

    Attributes:
        draft: of a model of its own.
        draft_vocab_size: of a head's own vocabulary.
    """

    target: WideShape
    draft: WideShape
    draft_vocab_size: int


SIZES = {
    "8b": PairSize(SHAPE_8B, SHAPE_1B, 32_000),
    "32b": PairSize(SHAPE_32B, SHAPE_1B, 32_000),
    "70b": PairSize(SHAPE_70B, SHAPE_1B, 32_000),
    # As many bytes as each of four GPUs has of a 70B.
    "70b-quarter": PairSize(replace(SHAPE_70B, num_layers=20), SHAPE_1B, 32_000),
    "trial": PairSize(
        WideShape(1024, 8, 8, 2, 2560, 8448),
        WideShape(512, 4, 8, 4, 1536, 8448, tie_word_embeddings=True),
        8192,
    ),
}


def wide_models(
    folder: Path, size: PairSize, algorithm: Algorithm, target: Path, draft: Path
) -> tuple[Path, Path]:
    """Returns folders of wide copies of a target and of its draft. Those of models are descriptions
    that `tests.bench.service` loads; a head's holds its weights, about 1 GB beside an 8B.

    Raises:
        CannotWiden: the sizes do not fit.
        CheckpointError: a folder cannot be read.
    """
    wide_target, wide_draft = folder / "target", folder / "draft"
    model = describe(wide_target, target, size.target)
    if algorithm.reads_features:
        _write_head(wide_draft, size, model, algorithm, draft)
    elif algorithm.has_model:
        describe(wide_draft, draft, size.draft)
    return wide_target, wide_draft


def described_models(
    folder: Path, size: PairSize, target: Path, head: Path | None, draft: Path
) -> tuple[Path, Path | None, Path]:
    """Returns folders of wide copies of a target, of its EAGLE-3 head, if there is one, and of a
    smaller model; see `wide_models`."""
    wide_target, wide_head, wide_draft = folder / "target", folder / "head", folder / "draft"
    model = describe(wide_target, target, size.target)
    describe(wide_draft, draft, size.draft)
    if head is None:
        return wide_target, None, wide_draft
    if not is_written(wide_head):
        _write_head(wide_head, size, model, Algorithm.EAGLE3, head)
    return wide_target, wide_head, wide_draft


def _write_head(
    folder: Path, size: PairSize, model: WideModel, algorithm: Algorithm, head: Path
) -> None:
    shape = WideHeadShape(size.target.intermediate_size, size.draft_vocab_size)
    WideHead(head, model, shape, algorithm=algorithm.value).write(folder, dtype=torch.bfloat16)
