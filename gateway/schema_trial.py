"""Checks JSON against schemas in a process that may be killed: some schemas take for ever to check.

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
        valid: None where the check failed to run.
        error: the first error; None where there is none.
        path: JSON pointer to the first error; None where there is none.
    """

    valid: bool | None
    error: str | None
    path: str | None


def unknown(error: str) -> Verdict:
    """Returns the verdict of a check that failed to run."""
    return Verdict(valid=None, error=error[:_MAX_CHARACTERS], path=None)


def verdict(schema: dict[str, Any], text: str) -> Verdict:
    """Returns whether a text is JSON that matches a schema."""
    import jsonschema_rs  # not at the top: the gateway's process imports this module, too

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Verdict(valid=False, error=f"not JSON: {error}", path="")
    try:
        validator = jsonschema_rs.validator_for(schema, offline=True)
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        return unknown(f"the schema is wrong: {error}")
    for violation in validator.iter_errors(value):
        path = "".join(f"/{part}" for part in violation.instance_path)
        return Verdict(valid=False, error=violation.message[:_MAX_CHARACTERS], path=path)
    return Verdict(valid=True, error=None, path=None)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    result = Verdict(valid=True, error=None, path=None)
    for schema, text in json.load(sys.stdin):
        result = verdict(schema, text)
        if not result["valid"]:
            break
    print(json.dumps(result))


if __name__ == "__main__":
    main()
