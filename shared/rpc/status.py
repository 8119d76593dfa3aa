"""Converts `OutriderError` to gRPC statuses with details, and back; reads a call's metadata.

The details are a serialized `google.rpc.Status` in the trailing metadata, where grpcurl, `buf curl`
and every gRPC client library look for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf import any_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode as GrpcCode
from grpc import aio
from grpc_status import rpc_status

from shared.errors import FieldViolation, OutriderError, Unavailable, error_class
from shared.telemetry.tracing import (
    REQUEST_ID_KEY,
    TRACEPARENT_KEY,
    accepted_request_id,
    current_request_id,
    current_traceparent,
)

Metadata = Iterable[tuple[str, str | bytes]]

ERROR_DOMAIN = "outrider"
DETAILS_KEY = "grpc-status-details-bin"
# Peers refuse metadata above 8 KiB, and one character of a message may take nine bytes.
_MAX_MESSAGE_LENGTH = 400
_MAX_VIOLATIONS = 4
# The details that grpcio sets instead of the server's status if a write meets the stream's end.
# https://github.com/grpc/grpc/issues/36066
_LOST_STATUS = "Internal error from Core"
_CODES = {code.value[0]: code for code in GrpcCode}


def enter_request(metadata: Metadata) -> str:
    """Sets the request id and trace context of the current task from a call's metadata; returns the
    request id."""
    texts = {key: value for key, value in metadata if isinstance(value, str)}
    request_id = accepted_request_id(texts.get(REQUEST_ID_KEY))
    current_request_id.set(request_id)
    current_traceparent.set(texts.get(TRACEPARENT_KEY))
    return request_id


def abort_arguments(error: OutriderError, request_id: str) -> dict[str, Any]:
    return {
        "code": _CODES[int(error.code)],
        "details": _shortened(error.message),
        "trailing_metadata": (
            (DETAILS_KEY, status_of(error, request_id).SerializeToString()),
            (REQUEST_ID_KEY, request_id),
        ),
    }


def status_of(error: OutriderError, request_id: str) -> status_pb2.Status:
    """Returns the status of an error, with details."""
    details: list[message.Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    if error.violations:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(
                field=violation.field, description=_shortened(violation.description)
            )
            for violation in error.violations[:_MAX_VIOLATIONS]
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(retry)
    status = status_pb2.Status(code=int(error.code), message=_shortened(error.message))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def error_from_rpc(failure: aio.AioRpcError) -> OutriderError:
    """Returns the error of a failed call.

    A call that failed in transit, or at another kind of server, has no details: its reason is the
    name of its code. Codes without an error class give the root class.
    """
    code = failure.code()
    if failure.details() == _LOST_STATUS:
        return Unavailable("the stream ended while it was written to", reason="STREAM_BROKEN")
    info = error_details_pb2.ErrorInfo(reason=code.name)
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in _details(failure):
        for unpacked in (info, bad_request, retry):
            detail.Unpack(unpacked)
    has_delay = retry.HasField("retry_delay")
    return error_class(code.value[0])(
        failure.details() or code.name,
        reason=info.reason,
        violations=tuple(
            FieldViolation(violation.field, violation.description)
            for violation in bad_request.field_violations
        ),
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if has_delay else None,
    )


def _details(failure: aio.AioRpcError) -> list[any_pb2.Any]:
    try:
        status = rpc_status.from_call(failure)  # type: ignore[arg-type]
    except (ValueError, message.DecodeError):  # a peer's bad details must not hide the failure
        return []
    return [] if status is None else list(status.details)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE_LENGTH else text[: _MAX_MESSAGE_LENGTH - 1] + "…"
