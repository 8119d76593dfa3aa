"""Schemas of whole answers: the `openai` package's types, with what is told beyond them, and our
own where there is no such package or its type promises far more."""

from __future__ import annotations

from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from gateway.messages.answer_schema import MessageAnswer
from gateway.native.answer_schema import GenerateAnswer
from gateway.reference.answered import AnswerMetrics, Timings
from gateway.responses.answer_schema import ResponseAnswer

Schema = dict[str, Any]
_PREFIX = "#/components/schemas/"
_OF_OPENAI: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
}
_OWN: dict[str, type[BaseModel]] = {
    "/v1/responses": ResponseAnswer,
    "/v1/messages": MessageAnswer,
    "/generate": GenerateAnswer,
}
_BATCHED = frozenset({"/generate"})


def add_answers(paths: Schema, schemas: Schema) -> None:
    """Adds the schemas of whole answers to a document's paths and components."""
    metrics, timings = _add(schemas, AnswerMetrics), _add(schemas, Timings)
    for path, answer in (_OF_OPENAI | _OWN).items():
        schema = _add(schemas, answer)
        if path in _OF_OPENAI:
            schemas[answer.__name__]["properties"] |= {"metrics": metrics, "timings": timings}
        if path in _BATCHED:
            schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
        for operation in paths[path].values():
            operation["responses"]["200"]["content"]["application/json"]["schema"] = schema
    _allow_nothing_before_the_first_token(schemas["Logprobs"]["properties"])


def _add(schemas: Schema, answer: type[BaseModel]) -> Schema:
    """Adds a type and those it is made of; returns the reference to it."""
    schema = answer.model_json_schema(ref_template=_PREFIX + "{model}")
    for name, each in {**schema.pop("$defs", {}), answer.__name__: schema}.items():
        assert schemas.setdefault(name, each) == each, f"two schemas are named {name}"
    return {"$ref": f"{_PREFIX}{answer.__name__}"}


def _allow_nothing_before_the_first_token(logprobs: Schema) -> None:
    """An echoed prompt's first token has no log probability."""
    for name in ("token_logprobs", "top_logprobs"):
        for alternative in logprobs[name]["anyOf"]:
            if alternative.get("type") == "array":
                alternative["items"] = {"anyOf": [alternative["items"], {"type": "null"}]}
