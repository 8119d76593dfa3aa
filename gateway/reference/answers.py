"""Schemas of answers: the `openai` package's types, and what is told beyond them."""

from __future__ import annotations

from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

Schema = dict[str, Any]
_PREFIX = "#/components/schemas/"
_TYPES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NULL: Schema = {"type": "null"}
_SPECULATION: Schema = {
    "type": "object",
    "description": "What speculation did for an answer.",
    "required": ["mean_acceptance_length", "acceptance_histogram", "num_spec_steps"],
    "properties": {
        "mean_acceptance_length": {
            "type": "number",
            "minimum": 1,
            "description": "tokens of a round that verified a tree, the bonus token included",
        },
        "draft_acceptance_rate": {"type": "number", "minimum": 0, "maximum": 1},
        "acceptance_histogram": {
            "type": "array",
            "items": _COUNT,
            "description": "element n counts the rounds that accepted n draft tokens",
        },
        "num_spec_steps": _COUNT,
        "num_accepted_draft_tokens": _COUNT,
        "num_draft_tokens": _COUNT,
        "num_spec_tokens": {**_COUNT, "description": "the deepest path that was accepted"},
    },
}
_METRICS: Schema = {
    "type": "object",
    "required": ["speculative_decoding"],
    "properties": {
        "speculative_decoding": {"anyOf": [{"$ref": f"{_PREFIX}SpeculationMetrics"}, _NULL]}
    },
}


def add_answers(paths: Schema, schemas: Schema) -> None:
    """Adds the schemas of whole answers to a document's paths and components."""
    schemas["SpeculationMetrics"] = _SPECULATION
    for path, answer in _TYPES.items():
        schema = answer.model_json_schema(ref_template=_PREFIX + "{model}")
        schema["properties"]["metrics"] = _METRICS
        for name, each in {**schema.pop("$defs"), answer.__name__: schema}.items():
            assert schemas.setdefault(name, each) == each, f"two schemas are named {name}"
        content = paths[path]["post"]["responses"]["200"]["content"]
        content["application/json"]["schema"] = {"$ref": f"{_PREFIX}{answer.__name__}"}
    _allow_nothing_before_the_first_token(schemas["Logprobs"]["properties"])


def _allow_nothing_before_the_first_token(logprobs: Schema) -> None:
    """An echoed prompt's first token has no log probability."""
    for name in ("token_logprobs", "top_logprobs"):
        for alternative in logprobs[name]["anyOf"]:
            if alternative.get("type") == "array":
                alternative["items"] = {"anyOf": [alternative["items"], _NULL]}
