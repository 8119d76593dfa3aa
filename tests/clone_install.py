"""`make test-clone`: a newcomer's first minutes, from a clone without anything installed.

Clones the commit that is checked out, runs `make serve` in the clone with an empty home folder, and
sends the README's requests, by curl and by the client `openai`. Prints each step with its time.
Packages come from pip's index, in the versions of `constraints.txt`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.helpers.readme import run_requests
from tests.helpers.serving import ROOT, free_ports

_READY = "ready: "


def _say(begin_s: float, text: str) -> None:
    print(f"[{time.monotonic() - begin_s:4.0f} s] {text}", flush=True)


def _serve(clone: Path, home: Path, base_port: int) -> subprocess.Popen[str]:
    ports = f"--port {base_port} --target-port {base_port + 2} --draft-port {base_port + 4}"
    own = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.Popen(
        ["make", "serve", f"ARGS={ports}"],
        cwd=clone,
        env={**own, "HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C reaches it alone
    )


def main() -> None:
    """Clones, serves, asks and stops; keeps nothing."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        clone, home = Path(name) / "outrider", Path(name) / "home"
        home.mkdir()
        _say(begin_s, "$ git clone")
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        _say(begin_s, "$ make serve")
        port = next(free_ports(6))
        with _serve(clone, home, port) as process:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            ready = next((line for line in lines if line.startswith(_READY)), "")
            assert ready, "make serve ended before it was ready"
            _say(begin_s, ready.rstrip())
            streamed, said = run_requests(
                f"http://127.0.0.1:{port}", clone / ".venv" / "bin" / "python"
            )
            _say(begin_s, f"$ curl: {streamed.count('data: ')} events")
            _say(begin_s, f"$ python, openai: {said.rstrip()}")
            os.killpg(process.pid, signal.SIGINT)
        # Make waits for what it runs, and then ends by the signal itself.
        assert process.returncode in (0, -signal.SIGINT)
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
        _say(begin_s, "Ctrl-C: everything has ended")


if __name__ == "__main__":
    main()
