"""openai-python's tests of resources. They name objects that a mock server always has; here each
is made before it is asked for."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from openai._base_client import BaseClient

from suites.suite import URL, Selection, Suite

_OUT_OF_RANGE = "an example outside the specification's own range, or two that exclude each other"
_NO_INPUT = "a response without any input"
_OF_OPENAI = "OpenAI itself answers what its type refuses"
_PLACEHOLDERS = frozenset({"resp_677efb5139a88190b512bc3fef8e535d", "response_id"})
SUITE = Suite(
    requirement="openai==3.54.0",
    part="/tests/",
    root="openai-*",
    files=tuple(
        f"tests/api_resources/{name}"
        for name in (
            *("chat", "responses", "conversations", "test_completions.py", "test_models.py"),
            *("test_responses.py", "test_conversations.py"),
        )
    ),
    not_applicable={
        "chat/completions/test_messages.py*_list[[]*": _OF_OPENAI,
        "chat/completions/test_messages.py*_list_with_all_params*": _OUT_OF_RANGE,
        "test_method_list_with_all_params*": _OUT_OF_RANGE,
        "test_completions.py*create_with_all_params*": _OUT_OF_RANGE,
        "test_responses.py*compact_with_all_params*": _OF_OPENAI,  # users' messages
        "test_responses.py*create_with_all_params*": _OUT_OF_RANGE,
        "test_input_tokens.py*": _NO_INPUT,
        "test_responses.py*test_*_create_overload_*": _NO_INPUT,
        "test_models.py*_delete*": "models that a client made",
    },
    options=("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=session"),
    environment={"TEST_API_BASE_URL": f"{URL}/v1"},
)


def _ask(path: str, body: object = None) -> Any:
    content = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/v1{path}", content, headers)) as got:
        return json.load(got)


def _made(parts: list[str], *, is_streamed: bool) -> list[str]:
    """Returns the parts of a path with ids of objects that are there."""
    match parts:
        case ["", "responses", str(name), *rest] if name in _PLACEHOLDERS:
            body = {"input": "Hi", "max_output_tokens": 2, "background": True}
            return ["", "responses", _response(body | {"stream": is_streamed}), *rest]
        case ["", "conversations", "conv_123", *rest]:
            items = [{"type": "message", "role": "user", "content": "Hi"}]
            name = _ask("/conversations", {"items": items})["id"]
            if rest[:1] == ["items"] and rest[1:]:
                rest = ["items", _ask(f"/conversations/{name}/items")["data"][0]["id"]]
            return ["", "conversations", name, *rest]
        case ["", "chat", "completions", "completion_id", *rest]:
            messages = [{"role": "user", "content": "Hi"}]
            body = {"messages": messages, "max_tokens": 2, "store": True}
            return ["", "chat", "completions", _ask("/chat/completions", body)["id"], *rest]
    return parts


def _response(body: dict[str, Any]) -> str:
    content = json.dumps(body).encode()
    request = urllib.request.Request(
        f"{URL}/v1/responses", content, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as got:
        if not body["stream"]:
            return str(json.load(got)["id"])
        for line in got:
            if line.startswith(b"data: "):
                return str(json.loads(line[6:])["response"]["id"])
    raise AssertionError("a stream without events")


_build = BaseClient._build_request


def _build_request(self: Any, options: Any, **others: Any) -> Any:
    parts = _made(options.url.split("/"), is_streamed=bool((options.params or {}).get("stream")))
    return _build(self, options.model_copy(update={"url": "/".join(parts)}), **others)


def pytest_configure(config: pytest.Config) -> None:
    BaseClient._build_request = _build_request  # type: ignore[method-assign]
    config.pluginmanager.register(Selection(SUITE))
