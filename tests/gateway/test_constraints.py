"""Every interface's way to say what the output must match, as it reaches the target."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from google.protobuf.json_format import MessageToDict

from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from tests.gateway.driving import CHAT, error_of
from tests.helpers.fake_target import FakeTarget

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TAG = {"format": {"type": "const_string", "value": "x"}}
COMPLETION = {"model": "fake", "prompt": "then"}
MESSAGES = {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": "then"}]}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("response_format", {"type": "json_object"}, {"json_schema": {"type": "object"}}),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
        {"json_schema": SCHEMA},
    ),
    (
        "response_format",
        {"type": "structural_tag", **TAG},
        {"structural_tag": {"type": "structural_tag", **TAG}},
    ),
    ("structured_outputs", {"json": SCHEMA}, {"json_schema": SCHEMA}),
    ("structured_outputs", {"json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
    ("structured_outputs", {"json_object": True}, {"json_schema": {"type": "object"}}),
    ("structured_outputs", {"regex": r"\d+"}, {"regex": r"\d+"}),
    ("structured_outputs", {"choice": ["a", "b"]}, {"choices": {"texts": ["a", "b"]}}),
    ("structured_outputs", {"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
    ("structured_outputs", {"structural_tag": TAG}, {"structural_tag": TAG}),
    ("guided_json", SCHEMA, {"json_schema": SCHEMA}),
    ("guided_regex", "a+", {"regex": "a+"}),
    ("guided_choice", ["a"], {"choices": {"texts": ["a"]}}),
    ("guided_grammar", 'root ::= "a"', {"ebnf": 'root ::= "a"'}),
    ("regex", "a+", {"regex": "a+"}),
    ("ebnf", 'root ::= "a"', {"ebnf": 'root ::= "a"'}),
    ("grammar", 'root ::= "a"', {"ebnf": 'root ::= "a"'}),
    ("json_schema", json.dumps(SCHEMA), {"json_schema": SCHEMA}),
]  # type: ignore[list-item]


def _grammar(target: FakeTarget) -> dict[str, Any]:
    """Returns the grammar of the last request; JSON texts as what they hold, in their order."""
    sent = MessageToDict(target.submits[-1].request.grammar, preserving_proto_field_name=True)
    return {
        k: json.loads(v) if k in ("json_schema", "structural_tag") else v for k, v in sent.items()
    }


@pytest.mark.parametrize(("field", "value", "expected"), CASES)
async def test_openai_fields_become_one_grammar(
    client: httpx.AsyncClient, target: FakeTarget, field: str, value: Any, expected: dict[str, Any]
) -> None:
    for url, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        response = await client.post(url, json={**body, field: value, "max_tokens": 2, "n": 2})
        assert response.status_code == 200
        assert _grammar(target) == expected
        assert json.dumps(_grammar(target)) == json.dumps(expected), "the order of keys counts"
        assert len({each.request.grammar.SerializeToString() for each in target.submits[-2:]}) == 1


OTHERS = {
    "responses": (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        "text.format",
    ),
    "messages": (
        "/v1/messages",
        {**MESSAGES, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.format",
    ),
    "messages, older": (
        "/v1/messages",
        {**MESSAGES, "output_format": {"type": "json_schema", "schema": SCHEMA}},
        "output_format",
    ),
    "generate": (
        "/generate",
        {"text": "a", "sampling_params": {"json_schema": json.dumps(SCHEMA)}},
        "sampling_params.json_schema",
    ),
    "chat": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "response_format.json_schema",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
async def test_every_interface_has_its_place_and_its_name_in_errors(
    client: httpx.AsyncClient, target: FakeTarget, name: str
) -> None:
    url, body, field = OTHERS[name]
    assert (await client.post(url, json=body)).status_code == 200
    assert _grammar(target) == {"json_schema": SCHEMA}
    for stream in (False, True):
        refusal = pb.RequestFailure(
            code=3, reason="GRAMMAR_INVALID", message="the JSON schema is wrong", field="grammar"
        )
        target.refusals.append(refusal)
        response = await client.post(url, json={**body, "stream": stream})
        assert response.status_code == 400
        if url == "/v1/messages":
            assert "the JSON schema is wrong" in response.json()["error"]["message"]
        else:
            assert (await error_of(response))[1:3] == (field, "grammar_invalid")


async def test_text_format_of_responses_is_repeated(client: httpx.AsyncClient) -> None:
    _, body, _ = OTHERS["responses"]
    answer = (await client.post("/v1/responses", json=body)).json()
    assert answer["text"] == body["text"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf", "constraint_ambiguous"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "constraint_ambiguous",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "not_implemented"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "field_invalid",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "not_implemented",
        ),
        ({"response_format": "json"}, "response_format", "field_invalid"),
    ],
)
async def test_constraint_that_cannot_be_taken_is_refused_by_name(
    client: httpx.AsyncClient, target: FakeTarget, fields: dict[str, Any], param: str, code: str
) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert (await error_of(response))[:3] == (400, param, code)
    assert target.submits == []
