"""One copy brings every array, with its shape, type and alignment."""

from __future__ import annotations

import numpy as np
import torch

from shared.kv.upload import UploadBlock, downloaded, uploaded

CPU = torch.device("cpu")


def test_arrays_keep_values_shapes_and_types() -> None:
    arrays = [
        np.array([1, -2, 2**40], np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([True, False, True]),
        np.zeros(0, np.int64),
    ]
    tensors = uploaded(arrays, CPU)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.shape == array.shape
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_tensors_come_back() -> None:
    tensors = [
        torch.tensor([[True, False, True]]),
        torch.tensor([1, -2, 2**40]),
        torch.arange(6, dtype=torch.int32).view(2, 3).T,
        torch.zeros(0, 4, dtype=torch.int64),
    ]
    for tensor, array in zip(tensors, downloaded(tensors), strict=True):
        assert array.shape == tensor.shape
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(array, tensor.numpy())


def test_every_tensor_starts_at_a_whole_vector() -> None:
    tensors = uploaded([np.ones(count, np.int32) for count in (1, 3, 5)], CPU)
    first = tensors[0].data_ptr()
    assert [(tensor.data_ptr() - first) % 16 for tensor in tensors] == [0, 0, 0]


def test_later_writes_to_an_array_do_not_reach_the_tensor() -> None:
    array = np.array([1, 2], np.int64)
    [tensor] = uploaded([array], CPU)
    array[0] = 9
    assert tensor.tolist() == [1, 2]


def test_a_block_keeps_its_addresses_and_takes_new_values() -> None:
    first = [np.arange(3), np.array([True, False])]
    block = UploadBlock(first, np.zeros((2, 5), np.int32), CPU)
    assert [tensor.tolist() for tensor in block.tensors] == [[0, 1, 2], [True, False]]
    addresses = [tensor.data_ptr() for tensor in block.tensors]
    beside = np.arange(6, dtype=np.int32).reshape(2, 3)
    values = np.array([7, 8, 9])
    brought = block.fill([values, np.array([False, True])], beside)
    values[0] = 0
    assert [tensor.tolist() for tensor in block.tensors] == [[7, 8, 9], [False, True]]
    assert [tensor.data_ptr() for tensor in block.tensors] == addresses
    assert brought.tolist() == beside.tolist()
    assert not block.fill(first, beside[:0]).numel()
