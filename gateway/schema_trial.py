"""Checks JSON against schemas in a process that may be killed: a schema can take for ever.

`python -m gateway.schema_trial` reads pairs of a schema and a text, as one JSON list, and writes a
`Verdict`.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any, TypedDict

_MAX_BYTES = 1 << 30  # of address space
_MAX_CHARACTERS = 500


class Verdict(TypedDict):
    """The result of a check.

    Attributes:
        valid: None where the check could not be made.
        error: the first thing that is wrong; None where nothing is.
        path: where in the JSON, as a pointer; None where nothing is wrong.
    """

    valid: bool | None
    error: str | None
    path: str | None


def unknown(error: str) -> Verdict:
    """Returns the verdict where there is none."""
    return Verdict(valid=None, error=error[:_MAX_CHARACTERS], path=None)


def verdict(schema: dict[str, Any], text: str) -> Verdict:
    """Returns whether a text is JSON that keeps to a schema."""
    import jsonschema_rs  # only here: the gateway's own process has no need of it

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Verdict(valid=False, error=f"not JSON: {error}", path="")
    try:
        validator = jsonschema_rs.validator_for(schema, offline=True)
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        return unknown(f"the schema is wrong: {error}")
    for found in validator.iter_errors(value):
        path = "".join(f"/{each}" for each in found.instance_path)
        return Verdict(valid=False, error=found.message[:_MAX_CHARACTERS], path=path)
    return Verdict(valid=True, error=None, path=None)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found = Verdict(valid=True, error=None, path=None)
    for schema, text in json.load(sys.stdin):
        found = verdict(schema, text)
        if not found["valid"]:
            break
    print(json.dumps(found))


if __name__ == "__main__":
    main()
