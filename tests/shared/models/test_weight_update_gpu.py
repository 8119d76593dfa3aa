"""Weights that are replaced in place on a GPU, from pinned memory of the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.model_options import Quantisation
from tests.shared.models.test_weight_update import check_adding, check_reading

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("quantisation", [Quantisation.UNQUANT, Quantisation.INT8])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_checkpoint_read_in_place_is_the_one_a_start_loads(
    family: str, quantisation: Quantisation, tmp_path: Path
) -> None:
    check_reading(family, quantisation, tmp_path, DEVICE)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_tensors_of_a_trainer_on_the_gpu_are_put_in_place(family: str, tmp_path: Path) -> None:
    check_adding(family, tmp_path, DEVICE)
