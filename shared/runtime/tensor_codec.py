"""Tensors to and from protobuf messages: dtype, shape and raw little-endian elements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from shared.errors import InvalidArgument
from shared.pb.outrider.types.v1 import tensor_pb2

_NUMBERS = MappingProxyType(
    {
        torch.float32: tensor_pb2.DATA_TYPE_FLOAT32,
        torch.float16: tensor_pb2.DATA_TYPE_FLOAT16,
        torch.bfloat16: tensor_pb2.DATA_TYPE_BFLOAT16,
        torch.int32: tensor_pb2.DATA_TYPE_INT32,
        torch.int64: tensor_pb2.DATA_TYPE_INT64,
    }
)
_DTYPES: Mapping[int, torch.dtype] = MappingProxyType(
    {number: dtype for dtype, number in _NUMBERS.items()}
)


def data_type_number(dtype: torch.dtype) -> tensor_pb2.DataType:
    """Returns the protobuf number of a dtype, which must have one."""
    assert dtype in _NUMBERS, f"{dtype} has no wire form"
    return _NUMBERS[dtype]


def dtype_from_number(number: int) -> torch.dtype:
    """Returns the dtype of a protobuf number.

    Raises:
        InvalidArgument: the number is not set, or was added later.
    """
    dtype = _DTYPES.get(number)
    if dtype is None:
        raise _malformed(f"data_type is {number}; it must be one of {sorted(_DTYPES)}")
    return dtype


def tensor_message(tensor: Tensor) -> tensor_pb2.Tensor:
    """Returns the message of a tensor on any device. Waits for the device and copies the elements
    once, into memory of protobuf."""
    elements = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return tensor_pb2.Tensor(
        data_type=data_type_number(tensor.dtype),
        shape=tensor.shape,
        data=elements.numpy().tobytes(),
    )


def tensor_from_message(message: tensor_pb2.Tensor) -> Tensor:
    """Returns the tensor in host memory.

    The elements are copied once, because torch cannot hold memory that must not be written, and
    the bytes of a message must not.

    Raises:
        InvalidArgument: the dtype is unknown, a dimension is negative, or the size of the data
            does not match dtype and shape; names both sizes.
    """
    dtype, shape = dtype_from_number(message.data_type), tuple(message.shape)
    if any(extent < 0 for extent in shape):
        raise _malformed(f"shape is {list(shape)}; no extent may be negative")
    data = message.data
    size_bytes = math.prod(shape) * dtype.itemsize
    if len(data) != size_bytes:
        raise _malformed(
            f"data has {len(data):,} bytes; shape {list(shape)} of {dtype} takes {size_bytes:,}"
        )
    if size_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _malformed(message: str) -> InvalidArgument:
    return InvalidArgument.of("TENSOR_MALFORMED", "tensor", message)
