"""Sizes that a pair of processes is widened to, and the folders that describe them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.draft.algorithm import Algorithm
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
    "70b-with-8b": PairSize(SHAPE_70B, SHAPE_8B, 32_000),
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
    """Returns folders of wide copies of a target and of its draft, see `write_draft`. The target's
    is a description that `tests.bench.service` loads.

    Raises:
        CannotWiden: the sizes do not fit.
        CheckpointError: a folder cannot be read.
    """
    model = describe(folder / "target", target, size.target)
    wide = folder / "draft"
    write_draft(wide, size, model, algorithm, draft)
    return folder / "target", wide


def write_draft(
    folder: Path, size: PairSize, target: WideModel, algorithm: Algorithm, draft: Path
) -> None:
    """Makes `folder` a wide copy of a draft for a target. That of a model is a description; a
    head's holds its weights, about 1 GB beside an 8B.

    Raises:
        CannotWiden, CheckpointError: see `wide_models`.
    """
    if algorithm.reads_features:
        shape = WideHeadShape(size.target.intermediate_size, size.draft_vocab_size)
        head = WideHead(draft, target, shape, algorithm=algorithm.value)
        head.write(folder, dtype=torch.bfloat16)
    elif algorithm.has_model:
        describe(folder, draft, size.draft)
