"""Errors survive the way over the wire; failures of others are read for what they are."""

from __future__ import annotations

import grpc
import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from shared import errors
from shared.rpc.status import DETAILS_KEY, abort_arguments, error_from_rpc

CLASSES = (
    errors.InvalidArgument,
    errors.FailedPrecondition,
    errors.QueueFull,
    errors.Unavailable,
    errors.NotFound,
    errors.PermissionDenied,
    errors.Cancelled,
    errors.DeadlineExceeded,
    errors.Unimplemented,
    errors.EngineFailed,
)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=100)
violations = st.lists(st.builds(errors.FieldViolation, texts, texts), max_size=4).map(tuple)
delays = st.none() | st.integers(0, 10**6).map(lambda milliseconds: milliseconds / 1e3)


def failed(
    code: grpc.StatusCode, details: str, *metadata: tuple[str, str | bytes]
) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*metadata), details)


def over_the_wire(error: errors.OutriderError) -> errors.OutriderError:
    arguments = abort_arguments(error, "r-1")
    return error_from_rpc(
        failed(arguments["code"], arguments["details"], *arguments["trailing_metadata"])
    )


@given(st.sampled_from(CLASSES), texts, texts, violations, delays)
def test_error_survives_the_wire(
    cls: type[errors.OutriderError],
    message: str,
    reason: str,
    violations: tuple[errors.FieldViolation, ...],
    retry_after_s: float | None,
) -> None:
    error = cls(message, reason=reason, violations=violations, retry_after_s=retry_after_s)
    received = over_the_wire(error)
    assert type(received) is cls
    assert (received.message, received.reason) == (message, reason)
    assert received.violations == violations
    assert received.retry_after_s == retry_after_s


def test_every_code_of_the_tree_has_its_class() -> None:
    assert {errors.error_class(code) for code in errors.StatusCode} == set(CLASSES)


def test_failure_without_details_is_named_after_its_code() -> None:
    error = error_from_rpc(failed(grpc.StatusCode.UNAVAILABLE, "failed to connect"))
    assert isinstance(error, errors.Unavailable)
    assert (error.reason, error.message) == ("UNAVAILABLE", "failed to connect")
    assert error.retry_after_s is None
    assert error.violations == ()


def test_status_that_was_lost_to_a_failed_write_is_a_broken_stream() -> None:
    error = error_from_rpc(failed(grpc.StatusCode.INTERNAL, "Internal error from Core"))
    assert isinstance(error, errors.Unavailable)
    assert error.reason == "STREAM_BROKEN"


def test_code_of_no_class_gives_the_root() -> None:
    error = error_from_rpc(failed(grpc.StatusCode.DATA_LOSS, "gone"))
    assert type(error) is errors.OutriderError
    assert error.reason == "DATA_LOSS"


def test_details_that_cannot_be_read_do_not_hide_the_failure() -> None:
    error = error_from_rpc(failed(grpc.StatusCode.NOT_FOUND, "no", (DETAILS_KEY, b"\xff\xff")))
    assert isinstance(error, errors.NotFound)
    assert error.reason == "NOT_FOUND"


def test_long_message_is_cut_to_what_metadata_can_carry() -> None:
    long = errors.InvalidArgument.of("TOO_LONG", "field", "\N{SNOWMAN}" * 5000)
    arguments = abort_arguments(long, "r-1")
    percent_encoded = 3 * len(arguments["details"].encode())
    details = sum(len(value) for key, value in arguments["trailing_metadata"])
    assert percent_encoded + details < 8192
    assert arguments["details"].endswith("…")


@pytest.mark.parametrize("cls", CLASSES)
def test_rich_status_repeats_code_and_message_of_the_call(cls: type[errors.OutriderError]) -> None:
    arguments = abort_arguments(cls("why", reason="R"), "r-1")
    assert arguments["code"].value[0] == cls.code
    assert arguments["details"] == "why"
