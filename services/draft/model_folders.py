"""Default folders of the drafters: the demo's."""

from __future__ import annotations

from pathlib import Path

from services.draft.algorithm import Algorithm
from shared.models.config_file import ConfigFile

DEMO = Path(__file__).parents[2] / "shared" / "demo"
DEMO_DRAFT = DEMO / "draft"
DEMO_TARGET = DEMO / "target"
DEMO_HEADS = DEMO / "heads"
_LAYER_COUNT_KEY = "num_nextn_predict_layers"


def has_next_token_layers(folder: Path) -> bool:
    """Whether a target brings next-token layers (MTP) of its own; False where nothing is there."""
    path = folder / "config.json"
    return path.is_file() and ConfigFile.read(path).integer(_LAYER_COUNT_KEY, 0) > 0


def default_model_folder(algorithm: Algorithm, target_folder: Path) -> Path:
    """Returns the folder of a drafter that has a model.

    Args:
        target_folder: of the target that a head belongs to.
    """
    if algorithm is Algorithm.MTP and target_folder.resolve() != DEMO_TARGET.resolve():
        # A model brings its own next-token layers.
        return target_folder
    return DEMO_HEADS / algorithm.value.lower() if algorithm.reads_features else DEMO_DRAFT
