"""Errors that a caller can cause, as a tree. Each has a reason and a gRPC status code.

OutriderError
├── InvalidArgument          INVALID_ARGUMENT      names the field, the value and the limit
├── FailedPrecondition       FAILED_PRECONDITION   the two sides disagree; an operator must act
├── QueueFull                RESOURCE_EXHAUSTED    retry later, or elsewhere
├── Unavailable              UNAVAILABLE           starting or draining; retry elsewhere
├── NotFound                 NOT_FOUND
├── PermissionDenied         PERMISSION_DENIED
├── Cancelled                CANCELLED             the caller ended it
├── DeadlineExceeded         DEADLINE_EXCEEDED     the caller's deadline passed
├── Unimplemented            UNIMPLEMENTED         this process does not offer it; another may
├── EngineFailed             INTERNAL              our fault; details stay in the log
├── SettingsError            (at start only)       every bad setting at once
└── CheckpointError          (at start only)       names the file, the key and the shapes

Our own bugs are `assert`s, not errors of this tree.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn, Self


class StatusCode(enum.IntEnum):
    """Canonical gRPC status codes of the errors, so that this module needs no grpc."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A request field and what is wrong with it."""

    field: str
    description: str


class OutriderError(Exception):
    """Root of the tree.

    Attributes:
        reason: UPPER_SNAKE_CASE, stable; sent as `ErrorInfo.reason`.
        message: names the value and the limit.
        violations: the invalid fields, for `BadRequest`.
        retry_after_s: when a retry may succeed, for `RetryInfo`; None: do not retry.
    """

    code = StatusCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_after_s = retry_after_s


class InvalidArgument(OutriderError):
    """The request is invalid; sending it again cannot help."""

    code = StatusCode.INVALID_ARGUMENT

    @classmethod
    def of(cls, reason: str, field: str, message: str) -> Self:
        return cls(message, reason=reason, violations=(FieldViolation(field, message),))

    @classmethod
    def out_of_range(cls, field: str, value: object, limit: str) -> Self:
        message = f"{field} is {value}; it must be in {limit}"
        if not limit.startswith(("[", "(")):
            message = f"{field} is {value}; it must be {limit}"
        return cls.of("SAMPLING_PARAM_OUT_OF_RANGE", field, message)

    @classmethod
    def wrong_count(cls, field: str, count: int, noun: str, limit: str) -> Self:
        """Args:
        noun: the items counted, in the plural.
        """
        message = f"{field} has {count:,} {noun}; it must have {limit}"
        return cls.of("SAMPLING_PARAM_OUT_OF_RANGE", field, message)

    @classmethod
    def malformed_tree(cls, message: str) -> Self:
        return cls.of("TREE_MALFORMED", "tree", f"malformed token tree: {message}")

    @classmethod
    def prompt_empty(cls) -> Self:
        return cls.of("PROMPT_EMPTY", "prompt", "the prompt has no tokens; at least 1 is needed")

    @classmethod
    def prompt_too_long(cls, num_tokens: int, limit: int, at_least: str = "") -> Self:
        # Client libraries look for the last words before they fall back or shorten the prompt.
        message = (
            f"the prompt has {at_least}{num_tokens:,} tokens; it may have {limit:,} and leave room "
            "for output: the prompt is longer than the model's context length"
        )
        return cls.of("PROMPT_TOO_LONG", "prompt", message)


class FailedPrecondition(OutriderError):
    """Both sides are valid but do not fit together."""

    code = StatusCode.FAILED_PRECONDITION

    @classmethod
    def tokenizer_mismatch(cls, draft_sha256: str, target_sha256: str) -> Self:
        return cls(
            f"the draft's tokenizer is {draft_sha256}; the target's is {target_sha256}; a "
            f"STANDALONE draft of another family takes the target's by --tokenizer, a head is made "
            f"for its target alone",
            reason="TOKENIZER_MISMATCH",
        )


class QueueFull(OutriderError):
    """A bounded queue is at its bound."""

    code = StatusCode.RESOURCE_EXHAUSTED

    @classmethod
    def of(cls, num_waiting: int, limit: int, *, retry_after_s: float = 1.0) -> Self:
        return cls(
            f"{num_waiting} requests are waiting; the queue holds {limit}",
            reason="QUEUE_FULL",
            retry_after_s=retry_after_s,
        )


class Unavailable(OutriderError):
    """The server is starting or draining."""

    code = StatusCode.UNAVAILABLE

    @classmethod
    def starting(cls) -> Self:
        return cls("the server is starting", reason="SERVER_STARTING", retry_after_s=1.0)

    @classmethod
    def draining(cls) -> Self:
        return cls("the server is draining", reason="SERVER_DRAINING", retry_after_s=1.0)


class PermissionDenied(OutriderError):
    """The caller is known, but not allowed to do this."""

    code = StatusCode.PERMISSION_DENIED


class NotFound(OutriderError):
    """No such thing."""

    code = StatusCode.NOT_FOUND


class Cancelled(OutriderError):
    """The caller ended the call."""

    code = StatusCode.CANCELLED


class DeadlineExceeded(OutriderError):
    """The call took longer than its caller allowed."""

    code = StatusCode.DEADLINE_EXCEEDED


class Unimplemented(OutriderError):
    """This process does not offer the method, in any state."""

    code = StatusCode.UNIMPLEMENTED

    @classmethod
    def of(cls, method: str, why: str) -> Self:
        return cls(f"{method} is not implemented: {why}", reason="METHOD_UNIMPLEMENTED")


class EngineFailed(OutriderError):
    """The engine failed; the caller gets only the request id."""

    code = StatusCode.INTERNAL

    @classmethod
    def of(cls) -> Self:
        return cls("the engine failed; see the server's log", reason="ENGINE_FAILED")


class SettingsError(OutriderError):
    """One or more settings are wrong; the message has a line for each."""

    code = StatusCode.INVALID_ARGUMENT

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems), reason="SETTINGS_INVALID")
        self.problems = problems


def raise_problems(problems: Iterable[str]) -> None:
    """Raises: SettingsError if there are problems, a line each."""
    lines = tuple(problems)
    if lines:
        raise SettingsError(lines)


class CheckpointError(OutriderError):
    """A model folder cannot be served; the message names the file, the key and the shapes."""

    code = StatusCode.FAILED_PRECONDITION

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="CHECKPOINT_INVALID")


MISFIT_EXIT_CODE = 3
"""Exit code of a process whose models cannot be read, or do not fit together."""


def end_process(program: str, error: OutriderError) -> NoReturn:
    """Ends this process with the error on stderr."""
    line = f"{program}: {error.message}"
    if error.code is not StatusCode.FAILED_PRECONDITION:
        sys.exit(line)
    print(line, file=sys.stderr)
    sys.exit(MISFIT_EXIT_CODE)


def error_class(code: int) -> type[OutriderError]:
    """Returns the error class of a canonical gRPC code.

    Codes that no class here has, such as DATA_LOSS, give the root class.
    """
    classes: tuple[type[OutriderError], ...] = (
        InvalidArgument,
        FailedPrecondition,
        QueueFull,
        Unavailable,
        NotFound,
        PermissionDenied,
        Cancelled,
        DeadlineExceeded,
        Unimplemented,
        EngineFailed,
    )
    return next((kind for kind in classes if kind.code == code), OutriderError)
