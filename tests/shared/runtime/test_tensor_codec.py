"""Tensors survive the wire bit by bit; anything malformed is refused."""

from __future__ import annotations

import pytest
import torch

from shared.errors import InvalidArgument
from shared.pb.outrider.types.v1 import tensor_pb2
from shared.runtime.tensor_codec import tensor_from_message, tensor_message

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (7,), (), (2, 3, 4)], ids=str)
def test_a_tensor_survives_the_wire(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    wire = tensor_message(tensor).SerializeToString()
    back = tensor_from_message(tensor_pb2.Tensor.FromString(wire))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_elements_are_little_endian_and_row_major() -> None:
    tensor = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32).T
    message = tensor_message(tensor)
    assert message.data == b"".join(n.to_bytes(4, "little") for n in (1, 3, 2, 4))
    assert list(message.shape) == [2, 2]
    assert message.data_type == tensor_pb2.DATA_TYPE_INT32


def test_a_received_tensor_may_be_written() -> None:
    back = tensor_from_message(tensor_message(torch.zeros(2)))
    back += 1
    assert back.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (tensor_pb2.Tensor(shape=[1], data=b"1234"), "data_type is 0"),
        (
            tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2, 3], data=b"12345"),
            "data has 5 bytes; shape [2, 3] of torch.float32 takes 24",
        ),
        (
            tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_INT32, shape=[-1, -1], data=b"1234"),
            "no extent may be negative",
        ),
    ],
    ids=["no dtype", "wrong size", "negative"],
)
def test_a_malformed_tensor_is_refused(message: tensor_pb2.Tensor, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        tensor_from_message(message)
    assert said in caught.value.message
