"""A gRPC contract as lines of text that hold all that counts on the wire, for comparisons."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

_TYPES = {number: name[5:].lower() for name, number in FieldDescriptorProto.Type.items()}


def contract_lines(files: Iterable[FileDescriptorProto]) -> list[str]:
    """Returns a line for each method and each field: names, numbers, types, presence."""
    lines: list[str] = []
    for file in files:
        for service in file.service:
            for method in service.method:
                streamed = "stream " if method.server_streaming else ""
                lines.append(
                    f"rpc {file.package}.{service.name}.{method.name} "
                    f"{method.input_type[1:]} {streamed}{method.output_type[1:]}"
                )
        for message in file.message_type:
            prefix = f".{file.package}.{message.name}"
            entries = {
                f"{prefix}.{nested.name}": f"map<{', '.join(_TYPES[f.type] for f in nested.field)}>"
                for nested in message.nested_type
                if nested.options.map_entry
            }
            for field in message.field:
                kind = entries.get(field.type_name) or field.type_name[1:] or _TYPES[field.type]
                lines.append(
                    f"{file.package}.{message.name} {field.number} {field.name} "
                    f"{_presence(field)}{kind}"
                )
    return sorted(lines)


def _presence(field: FieldDescriptorProto) -> str:
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return "repeated "
    if field.proto3_optional:
        return "optional "
    return "oneof " if field.HasField("oneof_index") else ""
