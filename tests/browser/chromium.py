"""Chromium without a screen, driven by Playwright; the browser is the system's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_DEFAULT = "/usr/bin/chromium"
_FLAGS = (
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    # A machine without a network must not be made to look for Google's hosts.
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Raises:
    FileNotFoundError: there is none; says how to get one.
    """
    path = Path(os.environ.get("CHROMIUM") or _DEFAULT)
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no Chromium at {path}: install it (Debian: apt-get install chromium) "
            "or say where it is, CHROMIUM=PATH"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()
