"""Trial compilation of grammars in processes that may be killed: llguidance cannot be stopped
otherwise, and within its bounds some patterns still take minutes and gigabytes.

`python -m services.target.grammars.trial` reads a tokenizer once and forks for each grammar. It
reads lines of JSON, each a grammar's kind and source, and writes an `TrialResult` for each.
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
from pathlib import Path
from typing import NoReturn, TypedDict

from services.target.grammars.source import STACK_BYTES, Vocabulary, compiled, read_vocabulary
from shared.errors import OutriderError
from shared.grammar import Grammar, GrammarKind

_NICE = 5  # the engine's threads have priority


class TrialResult(TypedDict, total=False):
    """The result of a trial.

    `outcome` is `good`, `wrong`, `slow`, `large` or `failed`. `num_bytes` is the memory of a good
    grammar; `reason` and `message` are the error of a wrong one, and `message` that of a compiler
    that failed.
    """

    outcome: str
    num_bytes: int
    reason: str
    message: str


def tried(
    grammar: Grammar, vocabulary: Vocabulary, max_bytes: int, timeout_s: float
) -> TrialResult:
    """Compiles a grammar in a fork, which is killed when it takes too long."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run(grammar, vocabulary, max_bytes, writing)
    os.close(writing)
    with open(reading, "rb") as answers:
        is_late = not select.select([answers], [], [], timeout_s)[0]
        if is_late:
            os.kill(pid, signal.SIGKILL)
        content = answers.read()
    os.waitpid(pid, 0)
    if is_late or not content:
        return TrialResult(outcome="slow" if is_late else "large")
    answer: TrialResult = json.loads(content)
    return answer


def _run(grammar: Grammar, vocabulary: Vocabulary, max_bytes: int, answers: int) -> NoReturn:
    """Compiles a grammar in the forked process, and ends the process."""
    status = 1
    with contextlib.suppress(BaseException):
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        os.nice(_NICE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = _data_bytes() + STACK_BYTES + max_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        threading.stack_size(STACK_BYTES)
        result: list[TrialResult] = []
        thread = threading.Thread(target=lambda: result.append(_compiled(grammar, vocabulary)))
        thread.start()
        thread.join()
        os.write(answers, json.dumps(result[0]).encode())
        status = 0
    os._exit(status)


def _compiled(grammar: Grammar, vocabulary: Vocabulary) -> TrialResult:
    before = _resident_bytes()
    try:
        compiled(grammar, vocabulary)
    except OutriderError as error:
        return TrialResult(outcome="wrong", reason=error.reason, message=error.message)
    except MemoryError:
        return TrialResult(outcome="large")
    except Exception as error:
        return TrialResult(outcome="failed", message=repr(error))
    return TrialResult(outcome="good", num_bytes=max(_resident_bytes() - before, 0))


def _resident_bytes() -> int:
    """Returns the peak resident memory of the process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _data_bytes() -> int:
    """Returns the memory that RLIMIT_DATA counts: private and writable."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def main() -> None:
    path, vocab_size, eos_token_ids, max_bytes, timeout_s = sys.argv[1:]
    vocabulary = read_vocabulary(Path(path), int(vocab_size), json.loads(eos_token_ids))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the target ends this process
    for line in sys.stdin:
        kind, source = json.loads(line)
        grammar = Grammar(GrammarKind(kind), tuple(source))
        print(json.dumps(tried(grammar, vocabulary, int(max_bytes), float(timeout_s))), flush=True)


if __name__ == "__main__":
    main()
