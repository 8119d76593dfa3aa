"""The part of a JSON schema that a grammar can enforce; the rest is checked at the answer's end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.output.arguments import own_types, property_schema, resolved
from shared.errors import InvalidArgument
from shared.grammar import JsonSchema, edited

# Keywords that the target's grammars do not support, each with the values that have no effect.
_UNENFORCED: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("if", "then", "else", "contains", "minContains", "maxContains"), ()),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), ()),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
    **dict.fromkeys(("propertyNames", "unevaluatedItems", "unevaluatedProperties"), (True, {})),
    "$recursiveAnchor": (True, False),
    "not": (False,),
    "uniqueItems": (False,),
}
# Look-around and back references, which a grammar's patterns do not support.
_UNSUPPORTED_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9k]")
_DRAFTS = frozenset(
    [f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)]
    + [f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")]
)


@dataclass(frozen=True, slots=True)
class AnswerSchemas:
    """Schemas that an answer is checked against when it ends.

    Attributes:
        text: schema of the answer's text; None where a grammar enforces it fully.
        calls: schemas of call arguments, by the name of the tool.
    """

    text: JsonSchema | None
    calls: Mapping[str, JsonSchema]


@dataclass(frozen=True, slots=True)
class GrammarSchema:
    """A schema that a grammar can enforce.

    Attributes:
        schema: allows every value that the whole schema allows.
        unenforced: keywords of the whole schema that it lacks, sorted.
    """

    schema: JsonSchema
    unenforced: tuple[str, ...]


def grammar_schema(whole: JsonSchema) -> GrammarSchema:
    """Returns the enforceable part of a schema.

    Raises:
        InvalidArgument: the part lacks a keyword of the schema, and the schema is wrong.
    """
    unenforced: set[str] = set()

    def loosen(schema: JsonSchema) -> None:
        _drop_keywords(schema, unenforced)
        _drop_patterns(schema, unenforced)
        _join_alternatives(schema, whole, unenforced)

    enforced = edited(whole, loosen)
    if unenforced:
        check_schema(whole)
    return GrammarSchema(enforced, tuple(sorted(unenforced)))


def _drop_keywords(schema: JsonSchema, unenforced: set[str]) -> None:
    for keyword in _UNENFORCED.keys() & schema.keys():
        if schema.pop(keyword) not in _UNENFORCED[keyword]:
            unenforced.add(keyword)
    if "$dynamicAnchor" in schema:  # without `$dynamicRef` it is only a plain anchor
        schema.setdefault("$anchor", schema.pop("$dynamicAnchor"))


def _drop_patterns(schema: JsonSchema, unenforced: set[str]) -> None:
    if _is_unsupported(schema.get("pattern")):
        del schema["pattern"]
        unenforced.add("pattern")
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and any(map(_is_unsupported, patterns)):
        del schema["patternProperties"]
        schema.pop("additionalProperties", None)  # would forbid properties that a pattern allows
        unenforced.add("patternProperties")


def _is_unsupported(pattern: object) -> bool:
    return isinstance(pattern, str) and _UNSUPPORTED_PATTERN.search(pattern) is not None


def _join_alternatives(schema: JsonSchema, whole: JsonSchema, unenforced: set[str]) -> None:
    """Replaces `oneOf` by `anyOf`, which is the same if no value matches two alternatives."""
    alternatives = schema.get("oneOf")
    if not isinstance(alternatives, list):
        return
    del schema["oneOf"]
    if "anyOf" not in schema:
        schema["anyOf"] = alternatives
    else:
        all_of = schema.get("allOf")
        all_of = all_of if isinstance(all_of, list) else []
        schema["allOf"] = [*all_of, {"anyOf": alternatives}]
    if not _are_disjoint(alternatives, whole):
        unenforced.add("oneOf")


def _are_disjoint(alternatives: list[Any], whole: JsonSchema) -> bool:
    """Returns whether no value can match two alternatives, because of their types or of different
    values of a property that all of them require."""
    if not all(isinstance(alternative, Mapping) for alternative in alternatives):
        return False
    schemas = [resolved(alternative, whole) for alternative in alternatives]
    types = [own_types(schema) for schema in schemas]
    types = [names | {"integer"} if "number" in names else names for names in types]
    if sum(map(len, types)) == len(frozenset().union(*types)):
        return True
    if any(names != {"object"} for names in types):
        return False
    required = [_strings(schema.get("required")) for schema in schemas]
    return any(
        _is_discriminator(name, schemas, whole) for name in frozenset.intersection(*required)
    )


def _is_discriminator(name: str, schemas: Sequence[Mapping[str, Any]], whole: JsonSchema) -> bool:
    """Returns whether the property has different strings as values in every schema."""
    seen: set[str] = set()
    for schema in schemas:
        value_schema = resolved(property_schema(schema, name), whole)
        constant = [value_schema["const"]] if "const" in value_schema else []
        values = value_schema.get("enum", constant)
        strings = _strings(values)
        if not strings or len(strings) < len(values) or seen & strings:
            return False
        seen |= strings
    return True


def _strings(values: object) -> frozenset[str]:
    """Returns the strings of a list; none if `values` is not a list."""
    items = values if isinstance(values, list) else ()
    return frozenset(item for item in items if isinstance(item, str))


def check_schema(schema: JsonSchema) -> None:
    """Raises:
    InvalidArgument: `schema` is not a JSON schema.
    """
    import jsonschema_rs  # 10 ms, for schemas that few requests have

    draft = schema.get("$schema")
    if not isinstance(draft, str) or draft.removesuffix("#") not in _DRAFTS:  # do not fetch it
        schema = {key: value for key, value in schema.items() if key != "$schema"}
    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as error:
        place = "".join(f"[{part!r}]" for part in error.instance_path)
        message = f"the JSON schema is wrong at {place or 'its top'}: {error.message[:500]}"
        raise InvalidArgument.of("GRAMMAR_INVALID", "grammar", message) from error
