"""Runs the README's requests against a running gateway."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.helpers.serving import ROOT

_ADDRESS = "http://127.0.0.1:8000"


def run_requests(base_url: str, python: str | Path) -> tuple[str, str]:
    """Runs the README's curl request and its Python program; returns the output of both.

    Args:
        base_url: URL of the gateway, in place of the README's.
        python: interpreter with the package `openai`.

    Raises:
        CalledProcessError: one of them failed.
    """
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    [curl] = [text for name, text in blocks if name == "sh" and text.startswith("curl")]
    [program] = [text for name, text in blocks if name == "python"]
    return (
        _run("bash", "-euc", curl.replace(_ADDRESS, base_url)),
        _run(str(python), "-c", program.replace(_ADDRESS, base_url)),
    )


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
