"""Tensors to and from their wire form: dtype, shape and raw little-endian elements."""

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
    """Returns the wire's name of a dtype; it must have one."""
    assert dtype in _NUMBERS, f"{dtype} has no wire form"
    return _NUMBERS[dtype]


def dtype_from_number(number: int) -> torch.dtype:
    """Returns the dtype of a wire name.

    Raises:
        InvalidArgument: it is not set, or was added later.
    """
    dtype = _DTYPES.get(number)
    if dtype is None:
        raise _malformed(f"data_type is {number}; it must be one of {sorted(_DTYPES)}")
    return dtype


def tensor_message(tensor: Tensor) -> tensor_pb2.Tensor:
    """Returns the message of a tensor on any device. Costs one copy of the elements, which
    protobuf owns, and waits for the device."""
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
        InvalidArgument: the dtype is unknown, a dimension is negative, or the data has another
            size than dtype and shape say; names both sizes.
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
