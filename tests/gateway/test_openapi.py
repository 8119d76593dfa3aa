"""The OpenAPI document: what it says of answers is what the routes answer."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from gateway.app import Gateway
from gateway.openapi import DocumentedApp
from tests.gateway.driving import CHAT, http_client

_DOCUMENTS: list[dict[str, Any]] = []


async def _document(client: httpx.AsyncClient) -> dict[str, Any]:
    """Returns the document, which every gateway has alike and takes a second to write."""
    if not _DOCUMENTS:
        _DOCUMENTS.append((await client.get("/openapi.json")).json())
    return _DOCUMENTS[0]


async def test_no_route_claims_fastapis_own_status_for_a_wrong_body(
    client: httpx.AsyncClient,
) -> None:
    document = await _document(client)
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
async def test_making_the_document_holds_up_no_other_request(
    client: httpx.AsyncClient, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with http_client(gateway) as other:  # an application keeps the one it has made
        document = await _document(other)
    others_are_answered = threading.Event()
    documents: list[bool] = []

    def make(_app: DocumentedApp) -> dict[str, Any]:
        documents.append(others_are_answered.wait(30.0))
        return document

    monkeypatch.setattr(DocumentedApp, "openapi", make)
    asked = asyncio.create_task(client.get(path))
    await asyncio.sleep(0)
    assert (await client.get("/version")).status_code == 200
    others_are_answered.set()
    assert (await asked).status_code == 200
    assert documents == [True]


async def test_answers_to_wrong_bodies_are_documented(client: httpx.AsyncClient) -> None:
    document = await _document(client)
    for path, operations in document["paths"].items():
        if "post" in operations and path != "/flush_cache":
            response = await client.post(path, content=b"{")
            assert str(response.status_code) in operations["post"]["responses"]
            said = operations["post"]["responses"][str(response.status_code)]["content"]
            schema = said["application/json"]["schema"]["$ref"].rpartition("/")[2]
            required = document["components"]["schemas"][schema]["required"]
            assert set(required) <= set(response.json())


@pytest.mark.parametrize("stream", [False, True])
async def test_content_types_of_answers_are_documented(
    client: httpx.AsyncClient, stream: bool
) -> None:
    document = await _document(client)
    path = "/v1/chat/completions"
    response = await client.post(path, json={**CHAT, "stream": stream})
    kind = response.headers["content-type"].partition(";")[0]
    assert kind in document["paths"][path]["post"]["responses"]["200"]["content"]
    kind = (await client.get("/metrics")).headers["content-type"].partition(";")[0]
    assert kind in document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]


async def test_answers_of_speculation_have_the_documented_fields(client: httpx.AsyncClient) -> None:
    schemas = (await _document(client))["components"]["schemas"]
    documented = schemas["SpeculationMetrics"]["properties"]
    for path, name in (("chat/completions", "ChatAnswer"), ("completions", "CompletionAnswer")):
        body = CHAT if name == "ChatAnswer" else {"model": "fake", "prompt": "the"}
        body = {**body, "max_tokens": 9, "ignore_eos": True}
        answer = (await client.post(f"/v1/{path}", json=body)).json()
        assert set(schemas[name]["required"]) <= set(answer) <= set(schemas[name]["properties"])
        assert set(answer["metrics"]["speculative_decoding"]) == set(documented)
    logprobs = schemas["CompletionLogprobs"]["properties"]["token_logprobs"]
    assert {"type": "array"}.items() <= logprobs.items()
    assert {"type": "null"} in logprobs["items"]["anyOf"]


async def test_every_reference_leads_somewhere(client: httpx.AsyncClient) -> None:
    document = await _document(client)
    schemas = document["components"]["schemas"]
    for each in _references(document):
        assert each.removeprefix("#/components/schemas/") in schemas


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        nested = [each for one in value.values() for each in _references(one)]
        return nested + ([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
    return [each for one in value for each in _references(one)] if isinstance(value, list) else []


async def test_the_page_names_every_route_and_field_and_loads_nothing(
    client: httpx.AsyncClient,
) -> None:
    document = await _document(client)
    response = await client.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    for path in document["paths"]:
        assert f"</b> {path}</h3>" in response.text
    for name, schema in document["components"]["schemas"].items():
        assert f'id="schema-{name}"' in response.text
        assert all(f"<code>{name}</code>" in response.text for name in schema.get("properties", ()))
    for loading in ("<script", "<link", "src=", "@import", "url(", 'href="http'):
        assert loading not in response.text


async def test_types_are_told_in_words(client: httpx.AsyncClient) -> None:
    page = (await client.get("/docs")).text
    for told in (
        'tools</code></td><td>list of <a href="#schema-ToolDefinition">ToolDefinition</a></td>',
        "<code>max_tokens</code></td><td>integer</td>",
        'content</code></td><td>string or list of <a href="#schema-ContentPart">ContentPart</a>',
        "<code>truncation_side</code></td><td>&#39;left&#39; | &#39;right&#39;</td>",
        "<code>role</code></td><td>&#39;assistant&#39;, required</td>",
    ):
        assert told in page
