"""Errors of our tree as rich gRPC statuses, and back.

The details travel as a serialized `google.rpc.Status` in the trailing metadata, where grpcurl,
`buf curl` and every gRPC client library look for them.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import any_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode as GrpcCode
from grpc import aio

from shared.errors import (
    EngineFailed,
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    NotFound,
    OutriderError,
    QueueFull,
    Unavailable,
)

ERROR_DOMAIN = "outrider"
DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in GrpcCode}
_CLASSES: dict[GrpcCode, type[OutriderError]] = {
    GrpcCode.INVALID_ARGUMENT: InvalidArgument,
    GrpcCode.FAILED_PRECONDITION: FailedPrecondition,
    GrpcCode.RESOURCE_EXHAUSTED: QueueFull,
    GrpcCode.INTERNAL: EngineFailed,
    GrpcCode.UNAVAILABLE: Unavailable,
    GrpcCode.NOT_FOUND: NotFound,
}


def grpc_code(error: OutriderError) -> GrpcCode:
    """Returns the gRPC status code of an error."""
    return _CODES[int(error.code)]


def status_details(error: OutriderError, request_id: str) -> bytes:
    """Returns the serialized `google.rpc.Status` of an error."""
    parts: list[message.Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    if error.violations:
        parts.append(_bad_request(error.violations))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        parts.append(retry)
    status = status_pb2.Status(code=int(error.code), message=error.message)
    for part in parts:
        packed = any_pb2.Any()
        packed.Pack(part)
        status.details.append(packed)
    serialized: bytes = status.SerializeToString()
    return serialized


def error_from_rpc(failure: aio.AioRpcError) -> OutriderError:
    """Returns the error that a failed call carries.

    A code without a class of its own, such as CANCELLED, comes out as the root class with the
    code's name as its reason.
    """
    status = status_pb2.Status()
    metadata: Any = failure.trailing_metadata()  # the stubs do not say that it iterates in pairs
    details = dict(metadata or ()).get(DETAILS_KEY)
    if isinstance(details, bytes):
        status.ParseFromString(details)
    info = error_details_pb2.ErrorInfo(reason=failure.code().name)
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        _ = detail.Unpack(info) or detail.Unpack(bad_request) or detail.Unpack(retry)
    error_class = _CLASSES.get(failure.code(), OutriderError)
    return error_class(
        failure.details() or failure.code().name,
        reason=info.reason,
        violations=tuple(
            FieldViolation(each.field, each.description) for each in bad_request.field_violations
        ),
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if retry.ByteSize() else None,
    )


def _bad_request(violations: tuple[FieldViolation, ...]) -> error_details_pb2.BadRequest:
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(
                field=violation.field, description=violation.description
            )
            for violation in violations
        ]
    )
