"""Weights arrive whole on a GPU, while its memory is in use."""

from __future__ import annotations

import pytest
import torch

from shared.models.weights import CopyPace, WeightCopy, copy_weights

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("num_threads", [1, 8])
def test_buffers_are_filled_again_only_when_their_copy_is_over(num_threads: int) -> None:
    # Every buffer is used hundreds of times.
    pace = CopyPace(num_threads, 1 << 14)
    wide = torch.randn(4096, 1536)
    sources = [wide, wide[:, 512:1024], wide.to(torch.bfloat16), wide[:2].repeat(64, 1), wide[5]]
    copies = [
        WeightCopy(source, torch.empty(source.shape, dtype=dtype, device=CUDA))
        for source in sources
        for dtype in DTYPES
    ]
    sum(copy_weights(copies, CUDA, pace))
    for each in copies:
        assert torch.equal(each.place.cpu(), each.source.to(each.place.dtype))


def test_memory_that_work_in_flight_reads_is_not_written_before() -> None:
    ones = torch.ones(1 << 24, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    total = ones.sum()
    del ones  # its memory is the next tensor's
    copy = WeightCopy(torch.zeros(1 << 24), torch.empty(1 << 24, device=CUDA))
    sum(copy_weights([copy], CUDA))
    assert total.item() == 1 << 24
