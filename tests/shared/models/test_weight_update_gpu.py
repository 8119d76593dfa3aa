"""Weights that are replaced in place on a GPU, where threads copy them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.model_options import LoadFormat, ModelOptions, Quantisation
from shared.models.checkpoint import Checkpoint
from shared.models.decoder import Decoder
from shared.models.decoder_weights import DecoderKeys
from shared.models.loader import load_decoder
from shared.models.weight_update import WeightStage, checksums, named_tensors
from tests.helpers.checkpoints import write_checkpoint

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def _decoder(folder: Path, options: ModelOptions) -> Decoder:
    return load_decoder(folder, dtype=torch.float32, device=DEVICE, options=options)


@pytest.mark.parametrize("quantisation", [Quantisation.UNQUANT, Quantisation.INT8])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_checkpoint_read_in_place_is_the_one_a_start_loads(
    family: str, quantisation: Quantisation, tmp_path: Path
) -> None:
    old = write_checkpoint(tmp_path / "old", family, seed=1)
    new = write_checkpoint(tmp_path / "new", family, seed=2)
    options = ModelOptions(quantisation=quantisation)
    decoder = _decoder(old, options)
    addresses = [tensor.data_ptr() for _, tensor in named_tensors(decoder)]
    stage = WeightStage(decoder, DecoderKeys.of(Checkpoint.open(old).files), options)
    stage.read(new, LoadFormat.AUTO)
    stage.apply()
    assert checksums(decoder) == checksums(_decoder(new, options))
    assert [tensor.data_ptr() for _, tensor in named_tensors(decoder)] == addresses
