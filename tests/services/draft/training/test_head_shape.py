"""The config of a trained head is read as it was meant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.draft.training.head_shape import Algorithm, head_config
from shared.models.heads.feature_spec import output_of
from tests.services.draft.training.test_averaging import SHAPE


@pytest.mark.parametrize("feature_layers", [(2, 3, 5), (1, 7), (7,)])
def test_dflash_heads_name_outputs_of_layers(feature_layers: tuple[int, ...]) -> None:
    # Layer 7 of a target of 6 is what its norm makes of the last output.
    shape = replace(SHAPE, algorithm=Algorithm.DFLASH, feature_layers=feature_layers)
    ids = head_config(shape)["dflash_config"]["target_layer_ids"]
    assert all(0 <= index < 6 for index in ids), "the loader refuses others"
    assert tuple(output_of(index, 6) for index in ids) == feature_layers
