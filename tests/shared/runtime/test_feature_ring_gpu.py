"""Feature rows in memory of a GPU that two processes share."""

from __future__ import annotations

import pytest
import torch

from shared.runtime.ring_memory import FeatureRings
from tests.helpers.ring_reader import DTYPE, NUM_ROWS, WIDTH, read_elsewhere


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_another_process_reads_the_rows(device: str) -> None:
    if torch.device(device).index >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    ring = FeatureRings(torch.device("cuda", 0)).open(NUM_ROWS, WIDTH, DTYPE)
    assert ring.address.cuda_ipc_handle
    read_elsewhere(ring, device)


@pytest.mark.gpu
def test_memory_that_a_draft_may_still_read_is_kept_for_the_next() -> None:
    rings = FeatureRings(torch.device("cuda"))
    first = rings.open(NUM_ROWS, WIDTH, DTYPE)
    rings.close(first)
    assert rings.open(NUM_ROWS, WIDTH, DTYPE).memory is first.memory
