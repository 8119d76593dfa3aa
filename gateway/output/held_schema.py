"""The part of a JSON schema that a grammar can hold; the rest is checked when the answer ends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.output.arguments import own_types, property_schema, resolved
from shared.errors import InvalidArgument
from shared.grammar import JsonSchema, edited

# What the target's grammars do not know, each with the values that ask for nothing.
_UNHELD: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("if", "then", "else", "contains", "minContains", "maxContains"), ()),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), ()),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
    **dict.fromkeys(("propertyNames", "unevaluatedItems", "unevaluatedProperties"), (True, {})),
    "$recursiveAnchor": (True, False),
    "not": (False,),
    "uniqueItems": (False,),
}
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9k]")  # or back: a grammar's patterns do neither
_DRAFTS = frozenset(
    [f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)]
    + [f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")]
)


@dataclass(frozen=True, slots=True)
class AnswerSchemas:
    """Schemas that an answer is checked against when it ends.

    Attributes:
        text: of the answer; None where a grammar holds all of it.
        calls: of arguments, by the name of the tool.
    """

    text: JsonSchema | None
    calls: Mapping[str, JsonSchema]


@dataclass(frozen=True, slots=True)
class HeldSchema:
    """A schema for a grammar.

    Attributes:
        schema: allows all that the whole schema allows.
        unheld: keywords of the whole schema that it does without, sorted.
    """

    schema: JsonSchema
    unheld: tuple[str, ...]


def held_schema(whole: JsonSchema) -> HeldSchema:
    """Raises:
    InvalidArgument: the grammar does without a keyword of the schema, and the schema is wrong.
    """
    unheld: set[str] = set()

    def loosen(schema: JsonSchema) -> None:
        _drop_keywords(schema, unheld)
        _drop_patterns(schema, unheld)
        _join_alternatives(schema, whole, unheld)

    held = edited(whole, loosen)
    if unheld:
        check_schema(whole)
    return HeldSchema(held, tuple(sorted(unheld)))


def _drop_keywords(schema: JsonSchema, unheld: set[str]) -> None:
    for keyword in _UNHELD.keys() & schema.keys():
        if schema.pop(keyword) not in _UNHELD[keyword]:
            unheld.add(keyword)
    if "$dynamicAnchor" in schema:  # which nothing refers to now but as an anchor
        schema.setdefault("$anchor", schema.pop("$dynamicAnchor"))


def _drop_patterns(schema: JsonSchema, unheld: set[str]) -> None:
    if _is_unheld(schema.get("pattern")):
        del schema["pattern"]
        unheld.add("pattern")
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and any(map(_is_unheld, patterns)):
        del schema["patternProperties"]
        schema.pop("additionalProperties", None)  # it would forbid what a pattern allowed
        unheld.add("patternProperties")


def _is_unheld(pattern: object) -> bool:
    return isinstance(pattern, str) and _LOOKS_AROUND.search(pattern) is not None


def _join_alternatives(schema: JsonSchema, whole: JsonSchema, unheld: set[str]) -> None:
    """Makes `oneOf` `anyOf`, which is the same where no value is of two of them."""
    alternatives = schema.get("oneOf")
    if not isinstance(alternatives, list):
        return
    del schema["oneOf"]
    if "anyOf" not in schema:
        schema["anyOf"] = alternatives
    else:
        others = schema.get("allOf")
        others = others if isinstance(others, list) else []
        schema["allOf"] = [*others, {"anyOf": alternatives}]
    if not _are_disjoint(alternatives, whole):
        unheld.add("oneOf")


def _are_disjoint(alternatives: list[Any], whole: JsonSchema) -> bool:
    """Whether types, or the values of a property that all of them require, tell them apart."""
    if not all(isinstance(each, Mapping) for each in alternatives):
        return False
    schemas = [resolved(each, whole) for each in alternatives]
    types = [own_types(each) for each in schemas]
    types = [each | {"integer"} if "number" in each else each for each in types]
    if sum(map(len, types)) == len(frozenset().union(*types)):
        return True
    if any(each != {"object"} for each in types):
        return False
    names = [_texts(each.get("required")) for each in schemas]
    return any(_tells_apart(name, schemas, whole) for name in frozenset.intersection(*names))


def _tells_apart(name: str, schemas: Sequence[Mapping[str, Any]], whole: JsonSchema) -> bool:
    seen: set[str] = set()
    for schema in schemas:
        found = property_schema(schema, name)
        found = resolved(found, whole)
        values = found.get("enum", [found["const"]] if "const" in found else [])
        own = _texts(values)
        if not own or len(own) < len(values) or seen & own:
            return False
        seen |= own
    return True


def _texts(values: object) -> frozenset[str]:
    """Returns the texts of a list; of anything else none."""
    given = values if isinstance(values, list) else ()
    return frozenset(each for each in given if isinstance(each, str))


def check_schema(schema: JsonSchema) -> None:
    """Raises:
    InvalidArgument: it is no schema.
    """
    import jsonschema_rs  # 10 ms, for schemas that few requests have

    draft = schema.get("$schema")
    is_known = isinstance(draft, str) and draft.removesuffix("#") in _DRAFTS
    known = schema if is_known else {k: v for k, v in schema.items() if k != "$schema"}
    try:
        jsonschema_rs.meta.validate(known)
    except jsonschema_rs.ValidationError as error:
        place = "".join(f"[{each!r}]" for each in error.instance_path)
        message = f"the JSON schema is wrong at {place or 'its top'}: {error.message[:500]}"
        raise InvalidArgument.of("GRAMMAR_INVALID", "grammar", message) from error
