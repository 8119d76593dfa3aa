"""The stack under load: started as `make serve` does, watched, its metrics and logs read."""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson

from shared.tokens import TreeShape
from tests.bench.http.client import Server
from tests.bench.scrape import add_counters
from tests.bench.stack import LAUNCHER, StackFailed, running_stack
from tests.helpers.serving import free_ports

HOST = "127.0.0.1"
_TAIL_LINES = 40
_CHAIN = TreeShape(5, 1, 6)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Models:
    """Folders of the target and of drafts.

    Attributes:
        target: None is the demo's.
        drafts: by algorithm; the demo's where there is none.
        launcher: the module of the `outrider` that loads them.
    """

    target: Path | None = None
    drafts: Mapping[str, Path] = field(default_factory=dict)
    launcher: str = LAUNCHER


@dataclass(frozen=True, slots=True)
class Mode:
    """How the stack decodes.

    Attributes:
        shape: of trees, pinned; None leaves it to the services.
        placement: of the draft, see `--placement`.
    """

    name: str
    algorithm: str
    shape: TreeShape | None = None
    placement: str = "embedded"

    def flags(self, models: Models) -> list[str]:
        """Returns the flags of `outrider serve`."""
        flags = ["--speculative-algorithm", self.algorithm]
        if models.target is not None:
            flags += ["--model-path", str(models.target)]
        if self.algorithm == "NONE":
            return flags
        flags += ["--placement", self.placement]
        folder = models.drafts.get(self.algorithm)
        if folder is not None:
            flags += ["--speculative-draft-model-path", str(folder)]
        if self.shape is not None:
            flags += ["--speculative-num-steps", str(self.shape.num_steps)]
            flags += ["--speculative-eagle-topk", str(self.shape.topk)]
            flags += ["--speculative-num-draft-tokens", str(self.shape.num_draft_tokens)]
        return flags


MODES = {
    mode.name: mode
    for mode in (
        Mode("plain", "NONE"),
        Mode("eagle3-chain", "EAGLE3", _CHAIN),
        Mode("eagle3", "EAGLE3"),
        Mode("eagle", "EAGLE"),
        Mode("mtp", "MTP"),
        Mode("dflash", "DFLASH"),
        Mode("ngram", "NGRAM"),
        Mode("standalone", "STANDALONE"),
        Mode("standalone-remote", "STANDALONE", placement="remote"),
        Mode("eagle3-remote", "EAGLE3", placement="remote"),
        Mode("eagle3-remote-chain", "EAGLE3", _CHAIN, placement="remote"),
    )
}


class StackDied(Exception):
    """A service ended; holds the last lines of every log."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack that answers.

    Attributes:
        ready_s: from the start of the launcher to its line that says so.
        metrics_port: of the target.
    """

    server: Server
    ready_s: float
    metrics_port: int
    log_dir: Path
    launcher: asyncio.subprocess.Process

    async def counters(self) -> dict[str, float]:
        """Returns the target's counters by name, with and without labels; none if it has none."""

        def read() -> str:
            with urllib.request.urlopen(f"http://{HOST}:{self.metrics_port}/metrics") as page:
                return str(page.read().decode())

        totals: dict[str, float] = {}
        with contextlib.suppress(OSError):
            add_counters(totals, await asyncio.to_thread(read))
        return totals

    async def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what the work does.

        Raises:
            StackDied: the stack ended first; the work is cancelled at once.
        """
        task = asyncio.ensure_future(work)
        end = asyncio.ensure_future(self.launcher.wait())
        try:
            await asyncio.wait((task, end), return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                raise StackDied(f"the stack ended with {end.result()}\n{log_tails(self.log_dir)}")
            return await task
        finally:
            for each in (task, end):
                each.cancel()
            await asyncio.gather(task, end, return_exceptions=True)


def log_tails(folder: Path) -> str:
    """Returns the last lines of every log of a folder."""
    parts = []
    for path in sorted(folder.glob("*.log")):
        with path.open(errors="replace") as log:
            parts.append(f"== {path}\n{''.join(deque(log, _TAIL_LINES)).rstrip()}")
    return "\n".join(parts)


@contextlib.asynccontextmanager
async def serving(
    flags: Sequence[str],
    log_dir: Path,
    temperature: float,
    start_timeout_s: float,
    launcher: str,
) -> AsyncIterator[Stack]:
    """Runs a stack until the block ends.

    Args:
        flags: of `outrider serve`, beside ports and logs.
        launcher: see `Models`.

    Raises:
        StackDied: it did not become ready.
    """
    port = next(free_ports(7))
    own = ["--log-dir", str(log_dir), "--stop-grace-s", "10"]
    own += ["--start-timeout-s", str(start_timeout_s), "--target-metrics-port", str(port + 4)]
    own += ["--gateway-port", str(port), "--target-port", str(port + 2)]
    own += ["--draft-port", str(port + 5)]
    started_s = time.monotonic()
    try:
        async with running_stack([*flags, *own], launcher) as process:
            ready_s = time.monotonic() - started_s
            model = await asyncio.to_thread(_served_model, port)
            server = Server(HOST, port, model, temperature)
            yield Stack(server, ready_s, port + 4, log_dir, process)
    except StackFailed as error:
        raise StackDied(f"{error}\n{log_tails(log_dir)}") from None


def _served_model(port: int) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}/v1/models") as answer:
        return str(orjson.loads(answer.read())["data"][0]["id"])
