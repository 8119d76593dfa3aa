"""What a head borrows is the same from its target's folder and from the target itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.models.heads.target_tensors import TargetTensors, target_tensors
from shared.models.loader import load_decoder
from tests.helpers.checkpoints import TinyShape, write_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_lends_what_its_folder_holds(
    is_tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    shape = TinyShape(tie_word_embeddings=is_tied)
    folder = write_checkpoint(tmp_path, shape=shape)
    decoder = load_decoder(folder, dtype=torch.float32, device=CPU)
    lent = target_tensors(folder, decoder, dtype=dtype, device=CPU)
    read = target_tensors(folder, None, dtype=dtype, device=CPU)
    assert lent.config == read.config
    assert torch.equal(lent.embedding(), read.embedding())
    assert torch.equal(lent.lm_head(), read.lm_head())
    assert lent.embedding().dtype == lent.lm_head().dtype == dtype


def test_a_lent_embedding_takes_no_memory(tmp_path: Path) -> None:
    decoder = load_decoder(write_checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    lent = TargetTensors.of_decoder(decoder, torch.float32).embedding()
    assert lent.data_ptr() == decoder.embedding.data_ptr()
