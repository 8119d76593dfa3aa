"""The bench of mixtures of experts on a GPU, at a tiny size: no row fails, graphs included."""

from __future__ import annotations

import pytest
import torch

from tests.bench.device_clock import device_ms
from tests.bench.expert_rounds import BATCHES, RoundsLine
from tests.bench.expert_shapes import SHAPES
from tests.bench.experts import ShapeBench
from tests.bench.test_expert_rounds import WITH_MTP, rounds_bench
from tests.bench.test_experts import tiny

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", SHAPES)
def test_every_row_is_measured(name: str) -> None:
    shape = tiny(SHAPES[name])
    lines = list(ShapeBench(shape, shape.layers_most, CUDA, device_ms).lines())
    assert len(lines) == len(shape.batches) + len(shape.trees) + 1


@pytest.mark.parametrize("name", WITH_MTP)
def test_rounds_of_every_batch_are_measured(name: str) -> None:
    bench = rounds_bench(SHAPES[name], device_ms, CUDA)
    lines = list(bench.rounds())
    assert [line.batch for line in lines if isinstance(line, RoundsLine)] == [*BATCHES], lines
    for line in lines:
        assert isinstance(line, RoundsLine)
        assert line.num_tokens == 2.5 * line.batch
        assert 0.0 < line.forward_ms < line.round_ms
