"""The check of an answer whose schema says more than a grammar holds."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import orjson

from gateway.bodies import whole_calls
from gateway.choice import Choice
from gateway.output.held_schema import AnswerSchemas
from gateway.schema_trial import Verdict, unknown
from shared.grammar import JsonSchema
from shared.tokens import FinishReason

_NUM_AT_ONCE = 2


class SchemaChecks:
    """Checks answers in processes of their own, two at a time."""

    def __init__(self, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(_NUM_AT_ONCE)

    async def run(self, schemas: AnswerSchemas, choice: Choice) -> Verdict | None:
        """Returns the verdict on a choice that has ended; None where nothing is to be checked, or
        it was cut off."""
        if choice.finish_reason is not FinishReason.STOP:
            return None
        pairs = _pairs(schemas, choice)
        if not pairs:
            return None
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                return await _checked(orjson.dumps(pairs))
        except TimeoutError:
            return unknown(f"the check took more than {self._timeout_s:g} s")


def _pairs(schemas: AnswerSchemas, choice: Choice) -> list[tuple[JsonSchema, str]]:
    output = choice.hold()
    calls = whole_calls(output.parts)
    if calls:
        return [(schemas.calls[c.name], text) for c, text in calls if c.name in schemas.calls]
    return [] if schemas.text is None else [(schemas.text, output.text)]


async def _checked(pairs: bytes) -> Verdict:
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
