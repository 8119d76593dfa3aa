"""One client: a program of its own, in an environment of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

_TIMEOUT_S = 900.0
_NUM_TOLD = 6000


@dataclass(frozen=True, slots=True)
class Client:
    """How a client is run.

    Attributes:
        environment: its folder below `.venv-clients/`; None needs none.
        program: the command; a bare first word is looked for in the environment.
    """

    name: str
    environment: str | None
    program: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended; `is_well` is None when it was not run."""

    name: str
    is_well: bool | None
    detail: str
    duration_s: float = 0.0

    def line(self) -> str:
        word = {None: "skipped", True: "passed", False: "FAILED"}[self.is_well]
        return f"{self.name:22s} {word:8s}{self.duration_s:6.0f} s  {self.detail}"


async def run_client(
    client: Client, command: tuple[str, ...], variables: Mapping[str, str]
) -> Outcome:
    """Runs it to its end; prints what it said when it failed.

    Args:
        variables: beside our own; `HOME` is also the folder that it runs in.
    """
    home = variables["HOME"]
    begin_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=home,
        # Some believe it rather than the kernel, and would work in the checkout.
        env={**os.environ, **variables, "PWD": home},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    except TimeoutError:
        output = b"no end within its time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
    await process.wait()
    text = output.decode(errors="replace").strip()
    is_well = process.returncode == 0
    if not is_well:
        print(text[-_NUM_TOLD:], flush=True)
    last_line = text.splitlines()[-1].strip("= ") if text else ""
    detail = last_line[:90] if is_well else f"exit code {process.returncode}"
    outcome = Outcome(client.name, is_well, detail, time.monotonic() - begin_s)
    print(outcome.line(), flush=True)
    return outcome
