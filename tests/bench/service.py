"""A target or a draft as it is served, but for what a benchmark needs of it.

    python -m tests.bench.service target|draft [FLAGS]

With `--distant` a draft shares no memory with its target, as one on another host. Folders that
describe a wide model are loaded (`wide_loading`), also by the processes that share a target's
model. Lines on stdin, `log on` or `disorder off`, switch two things that are off at first:

- log: what `--round-log` names is written. A line a message costs what is being measured.
- disorder: the draft's candidates come twice and in no order (`disorder`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

from services.bound import end_with_parent
from shared.runtime import ring_memory
from shared.telemetry.start_up import RoundLog
from tests.bench.disorder import Disorder
from tests.bench.switched_log import SwitchedRoundLog
from tests.bench.wide_loading import load_wide_models

if __name__ in ("__main__", "__mp_main__"):  # the latter in processes that this one spawns
    load_wide_models()


class Switch(Protocol):
    """Something that can be turned on and off while the process runs."""

    def turn(self, *, is_on: bool) -> None: ...


def obey(lines: Iterable[str], switches: Mapping[str, Switch]) -> None:
    """Turns switches on and off until the lines end."""
    for line in lines:
        name, state = line.split()
        switches[name].turn(is_on=state == "on")


def main() -> None:
    name, sys.argv = sys.argv[1], sys.argv[1:]
    if "--distant" in sys.argv:
        sys.argv.remove("--distant")
        ring_memory.host_id = lambda: ""
    end_with_parent()
    switches: dict[str, Switch] = {}
    if name == "draft":
        disorder = switches["disorder"] = Disorder()
        disorder.install()

    def open_log(path: Path | None) -> RoundLog | None:
        if path is None:
            return None
        log = switches["log"] = SwitchedRoundLog(path)
        return log

    entry = import_module(f"services.{name}.__main__")
    entry.open_round_log = open_log  # type: ignore[attr-defined]
    threading.Thread(target=obey, args=(sys.stdin, switches), daemon=True).start()
    entry.main()


if __name__ == "__main__":
    main()
