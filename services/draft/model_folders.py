"""Which folders a drafter is loaded from when none is named: the demo's."""

from __future__ import annotations

from pathlib import Path

from services.draft.algorithm import Algorithm

DEMO = Path(__file__).parents[2] / "shared" / "demo"
DEMO_DRAFT = DEMO / "draft"
DEMO_TARGET = DEMO / "target"
DEMO_HEADS = DEMO / "heads"


def default_model_folder(algorithm: Algorithm, target_folder: Path) -> Path:
    """Returns the folder of a drafter that has a model.

    Args:
        target_folder: of the target that a head belongs to.
    """
    if algorithm is Algorithm.MTP and target_folder.resolve() != DEMO_TARGET.resolve():
        # A model brings its own next-token layers.
        return target_folder
    return DEMO_HEADS / algorithm.value.lower() if algorithm.reads_features else DEMO_DRAFT
