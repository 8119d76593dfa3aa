"""A process that stands in for a service: `python -m tests.helpers.stand_in NAME JOURNAL [FLAGS]`.

Appends `NAME started` and, on SIGTERM, `NAME stopped` to the journal file.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("journal", type=Path)
    parser.add_argument(
        "--fail", type=int, nargs="?", const=3, help="print a reason and exit with this code"
    )
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    flags = parser.parse_args()

    def write(event: str) -> None:
        with flags.journal.open("a") as journal:
            journal.write(f"{flags.name} {event}\n")

    if flags.fail is not None:
        print("no weights found", flush=True)
        return int(flags.fail)
    signals = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    write("started")
    while signal.sigwait(signals) == signal.SIGTERM and flags.stubborn:
        write("ignored SIGTERM")
    write("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
