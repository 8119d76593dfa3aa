"""The demo stack with two drafts, a gateway that wants a key, and tabs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.chromium import chromium
from tests.browser.playground_page import SEED, PlaygroundPage
from tests.helpers.serving import EVERY_ROUND_HAS_A_TREE, ROOT, free_ports, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

OpenTab = Callable[..., PlaygroundPage]
KEY = "correct-horse"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def demo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo model with two drafts of different kinds."""
    logs = tmp_path_factory.mktemp("logs")
    drafts = ("--algorithm", "STANDALONE,NGRAM")
    with serving(logs, *drafts, env=EVERY_ROUND_HAS_A_TREE) as (process, ready_line, base_url):
        assert ready_line.startswith("ready: "), process.communicate()[1]
        yield f"{base_url}/"


@pytest.fixture(scope="session")
def locked_url(demo_url: str) -> Iterator[str]:
    """Another gateway in front of the same target, with a key."""
    port = next(free_ports(4))
    with urllib.request.urlopen(f"{demo_url}server_info") as info:
        [target] = json.load(info)["targets"]
    arguments = ["--port", str(port), "--target", target["address"]]
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", *arguments],
        cwd=ROOT,
        env={**os.environ, "OUTRIDER_GATEWAY_API_KEY": KEY},
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}/"
        _wait_until_ready(url)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@pytest.fixture
def open_tab(browser: Browser, demo_url: str) -> Iterator[OpenTab]:
    """Opens tabs; at the end each must have kept to its server and complained of nothing."""
    tabs: list[PlaygroundPage] = []

    def open_(url: str = demo_url, **options: object) -> PlaygroundPage:
        tab = PlaygroundPage(browser, url, **options)  # type: ignore[arg-type]
        tabs.append(tab)
        return tab

    yield open_
    for tab in tabs:
        tab.close()
    assert [tab.problems for tab in tabs] == [[]] * len(tabs)
    assert [tab.foreign for tab in tabs] == [[]] * len(tabs)


@pytest.fixture
def tab(open_tab: OpenTab) -> PlaygroundPage:
    """A tab of the demo with a fixed seed."""
    tab = open_tab()
    tab.until_served()
    tab.set(seed=SEED)
    return tab


def _wait_until_ready(url: str) -> None:
    deadline_s = time.monotonic() + 60.0
    while True:
        try:
            urllib.request.urlopen(f"{url}ready").close()
            return
        except urllib.error.URLError:
            assert time.monotonic() < deadline_s, "the gateway does not come up"
            time.sleep(0.05)
