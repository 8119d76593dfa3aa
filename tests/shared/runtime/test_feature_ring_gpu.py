"""Feature rows in memory of a GPU that two processes share."""

from __future__ import annotations

import pytest
import torch

from shared.runtime.feature_ring import FeatureRings
from tests.helpers.ring_reader import DTYPE, NUM_ROWS, WIDTH, read_elsewhere


@pytest.mark.gpu
def test_another_process_reads_the_rows() -> None:
    ring = FeatureRings(torch.device("cuda")).open(NUM_ROWS, WIDTH, DTYPE)
    assert ring.address.cuda_ipc_handle
    read_elsewhere(ring)


@pytest.mark.gpu
def test_memory_that_a_draft_may_still_read_is_kept_for_the_next() -> None:
    rings = FeatureRings(torch.device("cuda"))
    first = rings.open(NUM_ROWS, WIDTH, DTYPE)
    rings.close(first)
    assert rings.open(NUM_ROWS, WIDTH, DTYPE).memory is first.memory
