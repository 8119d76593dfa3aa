"""The page about the gateway names every field that the bodies have, and every one refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.messages.schema import MessagesRequest
from gateway.native.schema import DetokenizeRequest, GenerateRequest, TokenizeRequest
from gateway.responses.schema import ResponsesRequest
from gateway.schema import CHAT_FIELDS, Body, ChatCompletionRequest, CompletionRequest, Speculation

_PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
_EVERYWHERE = {"model", "stream", "messages", "prompt"}


@pytest.mark.parametrize(
    "body",
    [
        *(ChatCompletionRequest, CompletionRequest, Speculation, ResponsesRequest),
        *(MessagesRequest, GenerateRequest, TokenizeRequest, DetokenizeRequest),
    ],
)
def test_the_page_names_every_field(body: type[Body]) -> None:
    missing = {
        name for name in body.model_fields if f"`{name}" not in _PAGE and f".{name}" not in _PAGE
    }
    assert missing - _EVERYWHERE == set()


def test_the_page_names_every_field_that_is_refused() -> None:
    """Those that begin with `return_` are named together."""
    assert "`return_…` fields that are not" in _PAGE
    refused = {*CHAT_FIELDS.unimplemented, *CHAT_FIELDS.neutral}
    refused = {name for name in refused if not name.startswith("return_")}
    assert {name for name in refused if f"`{name}" not in _PAGE} == set()
