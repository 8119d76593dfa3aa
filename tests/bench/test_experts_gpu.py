"""The bench of mixtures of experts on a GPU, at a tiny size: no row fails, graphs included."""

from __future__ import annotations

import pytest
import torch

from tests.bench.device_clock import device_ms
from tests.bench.expert_shapes import SHAPES
from tests.bench.experts import ShapeBench
from tests.bench.test_experts import tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SHAPES)
def test_every_row_is_measured(name: str) -> None:
    shape = tiny(SHAPES[name])
    lines = list(ShapeBench(shape, shape.layers_most, torch.device("cuda"), device_ms).lines())
    assert len(lines) == len(shape.batches) + len(shape.trees) + 1
