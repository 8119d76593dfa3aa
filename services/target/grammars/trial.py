"""Tries grammars out in processes that may be killed: llguidance cannot be stopped in its own, and
its bounds leave patterns that take minutes and gigabytes.

`python -m services.target.grammars.trial` reads a tokenizer once and forks for each grammar. Lines
of JSON come in and go out; see `Request` and `Answer`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from services.target.grammars.source import STACK_BYTES, Vocabulary, compiled, read_vocabulary
from shared.errors import OutriderError
from shared.grammar import Grammar, GrammarKind

_NICE = 5  # the engine's own threads go first


class Request(TypedDict):
    """A grammar to try."""

    number: int
    kind: str
    source: list[str]


class Answer(TypedDict, total=False):
    """The result of a trial.

    `outcome` is `good`, `wrong`, `slow` or `large`. A good grammar keeps `num_bytes`; of a wrong
    one, `reason` and `message` are those of its error.
    """

    number: int
    outcome: str
    num_bytes: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class _Trial:
    number: int
    pid: int
    deadline_s: float


class _Trials:
    """The trials that run, by the pipe of their answer."""

    def __init__(self, vocabulary: Vocabulary, max_bytes: int, timeout_s: float) -> None:
        self._vocabulary = vocabulary
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._running: dict[int, _Trial] = {}

    def serve(self, requests: int) -> None:
        """Serves until there are no more requests."""
        pending = b""
        while True:
            ready, _, _ = select.select([requests, *self._running], [], [], self._patience_s())
            for pipe in set(ready) - {requests}:
                self._end(pipe)
            for pipe, trial in list(self._running.items()):
                if time.monotonic() >= trial.deadline_s:
                    self._end(pipe, is_late=True)
            if requests in ready:
                read = os.read(requests, 1 << 16)
                if not read:
                    break
                *lines, pending = (pending + read).split(b"\n")
                for line in lines:
                    self._begin(json.loads(line))
        for pipe in list(self._running):
            self._end(pipe, is_late=True)

    def _patience_s(self) -> float | None:
        if not self._running:
            return None
        return max(min(t.deadline_s for t in self._running.values()) - time.monotonic(), 0.0)

    def _begin(self, request: Request) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _run(Grammar(GrammarKind(request["kind"]), tuple(request["source"])),
                 self._vocabulary, self._max_bytes, writing)  # fmt: skip
        os.close(writing)
        deadline_s = time.monotonic() + self._timeout_s
        self._running[reading] = _Trial(request["number"], pid, deadline_s)

    def _end(self, pipe: int, *, is_late: bool = False) -> None:
        trial = self._running.pop(pipe)
        if is_late:
            os.kill(trial.pid, signal.SIGKILL)
        with open(pipe, "rb") as answers:
            content = b"" if is_late else answers.read()
        os.waitpid(trial.pid, 0)
        answer = json.loads(content) if content else {"outcome": "slow" if is_late else "large"}
        print(json.dumps({**answer, "number": trial.number}), flush=True)


def _run(grammar: Grammar, vocabulary: Vocabulary, max_bytes: int, answers: int) -> NoReturn:
    """Runs in a fork, which ends with it."""
    status = 1
    with contextlib.suppress(BaseException):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        os.nice(_NICE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = _data_bytes() + STACK_BYTES + max_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        threading.stack_size(STACK_BYTES)
        found: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: found.append(_tried(grammar, vocabulary)))
        thread.start()
        thread.join()
        os.write(answers, json.dumps(found[0]).encode())
        status = 0
    os._exit(status)


def _tried(grammar: Grammar, vocabulary: Vocabulary) -> dict[str, Any]:
    before = _resident_bytes()
    try:
        compiled(grammar, vocabulary)
    except OutriderError as error:
        return {"outcome": "wrong", "reason": error.reason, "message": error.message}
    return {"outcome": "good", "num_bytes": max(_resident_bytes() - before, 0)}


def _resident_bytes() -> int:
    """Returns the most that was ever in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _data_bytes() -> int:
    """Returns what RLIMIT_DATA counts: private writable memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def main() -> None:
    path, vocab_size, eos_token_ids, max_bytes, timeout_s = sys.argv[1:]
    vocabulary = read_vocabulary(Path(path), int(vocab_size), json.loads(eos_token_ids))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the target ends it
    _Trials(vocabulary, int(max_bytes), float(timeout_s)).serve(sys.stdin.fileno())


if __name__ == "__main__":
    main()
