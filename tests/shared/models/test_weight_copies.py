"""Weights arrive whole, whatever their size, strides and dtype."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shared.errors import CheckpointError
from shared.models.weights import SERVING_PACE, CopyPace, WeightCopy, copy_weights

CPU = torch.device("cpu")


def _copies() -> list[WeightCopy]:
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(70, 48, generator=generator)
    sources = [
        wide,
        wide[:, 16:32],  # the columns of a part of a model
        wide[3:4].repeat(5, 1),
        torch.randn(37, generator=generator).to(torch.bfloat16),
        torch.arange(12, dtype=torch.int64).view(3, 2, 2),
    ]
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.int32)
    places = [
        torch.zeros(source.shape, dtype=dtype)
        for source, dtype in zip(sources, dtypes, strict=True)
    ]
    return list(map(WeightCopy, sources, places))


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1024, 2**20])
def test_every_element_arrives_in_the_places_dtype(chunk_bytes: int) -> None:
    copies = _copies()
    num_bytes = sum(copy_weights(copies, CPU, CopyPace(2, chunk_bytes)))
    assert num_bytes == sum(each.place.nbytes for each in copies)
    for each in copies:
        assert torch.equal(each.place, each.source.to(each.place.dtype))


def test_beside_steps_copies_are_small_and_one_after_the_other() -> None:
    whole = torch.ones(3000, 1024)
    parts = list(copy_weights([WeightCopy(whole, torch.zeros(3000, 1024))], CPU, SERVING_PACE))
    assert SERVING_PACE.max_threads == 1
    assert max(parts) == 2**20
    assert sum(parts) == whole.nbytes


def test_a_tensor_that_cannot_be_read_is_told() -> None:
    def broken() -> Iterator[WeightCopy]:
        yield from _copies()
        raise CheckpointError("the file is damaged")

    with pytest.raises(CheckpointError, match="damaged"):
        list(copy_weights(broken(), CPU))
