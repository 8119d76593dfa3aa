"""Which HTTP status and which name of an error each gRPC status becomes."""

from __future__ import annotations

import pytest

from gateway.failures import Problem, http_status
from shared.errors import OutriderError, StatusCode, error_class

# Clients try 408, 409, 429 and 5xx again; 501 is for people, and only operators' routes have it.
EXPECTED = {
    StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error", "invalid_request_error"),
    StatusCode.PERMISSION_DENIED: (403, "invalid_request_error", "permission_error"),
    StatusCode.NOT_FOUND: (404, "invalid_request_error", "not_found_error"),
    StatusCode.CANCELLED: (410, "invalid_request_error", "invalid_request_error"),
    StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_error"),
    StatusCode.INTERNAL: (500, "server_error", "api_error"),
    StatusCode.FAILED_PRECONDITION: (501, "server_error", "api_error"),
    StatusCode.UNIMPLEMENTED: (501, "server_error", "api_error"),
    StatusCode.UNAVAILABLE: (503, "service_unavailable_error", "overloaded_error"),
    StatusCode.DEADLINE_EXCEEDED: (504, "server_error", "timeout_error"),
}


@pytest.mark.parametrize("code", StatusCode)
def test_every_code_has_its_status_and_names(code: StatusCode) -> None:
    error = error_class(code)("it failed", reason="REASON")
    problem = Problem.of(error)
    kinds = (problem.openai_body()["error"]["type"], problem.anthropic_body()["error"]["type"])
    assert (http_status(error), *kinds) == EXPECTED[code]


def test_a_code_nobody_of_ours_answers_with_is_a_500() -> None:
    assert http_status(OutriderError("gone", reason="DATA_LOSS")) == 500
