"""The VllmEngine contract is that of PyPI's smg-grpc-proto 0.4.28, number by number.

`vllm_engine.txt` was written by `contract_lines` from the descriptors of that package, without the
messages that have no fields here.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from shared.pb.smg.grpc.common import common_pb2
from shared.pb.vllm.grpc.engine import vllm_engine_pb2
from tests.helpers.contract_table import contract_lines

PUBLISHED = (Path(__file__).parent / "vllm_engine.txt").read_text().splitlines()


def _files() -> list[FileDescriptorProto]:
    files = []
    for module in (common_pb2, vllm_engine_pb2):
        file = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        files.append(file)
    return files


def test_the_contract_is_the_published_one() -> None:
    assert contract_lines(_files()) == PUBLISHED


def test_another_number_type_or_presence_would_be_seen() -> None:
    def changed(**values: int) -> list[str]:
        files = _files()
        [message] = [each for each in files[1].message_type if each.name == "SamplingParams"]
        for name, value in values.items():
            setattr(message.field[1], name, value)
        return contract_lines(files)

    assert changed() == PUBLISHED
    assert changed(number=99) != PUBLISHED
    assert changed(type=FieldDescriptorProto.TYPE_DOUBLE) != PUBLISHED
    assert changed(label=FieldDescriptorProto.LABEL_REPEATED) != PUBLISHED
    assert changed(proto3_optional=True) != PUBLISHED
