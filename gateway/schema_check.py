"""The check of an answer against a schema that a grammar enforces only in part."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import orjson

from gateway.bodies import whole_calls
from gateway.choice import Choice
from gateway.output.grammar_schema import AnswerSchemas
from gateway.schema_trial import Verdict, unknown
from shared.grammar import JsonSchema
from shared.tokens import FinishReason

_MAX_PROCESSES = 2


class SchemaChecks:
    """Checks each answer in a separate process, two at a time."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(_MAX_PROCESSES)

    async def run(self, schemas: AnswerSchemas, choice: Choice) -> Verdict | None:
        """Returns the verdict on an ended choice; None where there is nothing to check, or the
        output was cut off."""
        if choice.finish_reason is not FinishReason.STOP:
            return None
        pairs = _pairs(schemas, choice)
        if not pairs:
            return None
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                return await _run_trial(orjson.dumps(pairs))
        except TimeoutError:
            return unknown(f"the check took more than {self._timeout_s:g} s")


def _pairs(schemas: AnswerSchemas, choice: Choice) -> list[tuple[JsonSchema, str]]:
    """Returns the schemas to check, each with the JSON text that must match it."""
    output = choice.whole_output()
    calls = whole_calls(output.parts)
    if calls:
        return [(schemas.calls[c.name], text) for c, text in calls if c.name in schemas.calls]
    return [] if schemas.text is None else [(schemas.text, output.text)]


async def _run_trial(pairs: bytes) -> Verdict:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.schema_trial"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=Path(__file__).parents[1],
    )
    try:
        content, _ = await process.communicate(pairs)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if not content:
        return unknown("the check failed")
    verdict: Verdict = orjson.loads(content)
    return verdict
