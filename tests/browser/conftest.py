"""The demo stack with two drafts, a gateway that wants a key, and tabs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
def ports(demo_url: str) -> Iterator[int]:
    """Ports beside the demo's; none is given out twice, as services bind them late."""
    return free_ports(4)


@pytest.fixture(scope="session")
def locked_url(demo_url: str, ports: Iterator[int]) -> Iterator[str]:
    """Another gateway in front of the same target, with a key."""
    targets = ["--target", _address(demo_url)]
    port = next(ports)
    with _process("gateway", port, *targets, env={"OUTRIDER_GATEWAY_API_KEY": KEY}):
        url = f"http://127.0.0.1:{port}/"
        _wait_until(lambda: _json(f"{url}ready") is not None)
        yield url


@pytest.fixture(scope="session")
def several_url(demo_url: str, ports: Iterator[int]) -> Iterator[str]:
    """A gateway in front of two targets: `demo` with its drafts, and `bare` without any."""
    bare, port = next(ports), next(ports)
    targets = ["--target", _address(demo_url), "--target", f"127.0.0.1:{bare}"]
    with (
        _process("services.target", bare, "--served-model-name", "bare"),
        _process("gateway", port, *targets),
    ):
        url = f"http://127.0.0.1:{port}/"
        _wait_until(lambda: len(_json(f"{url}v1/models")["data"]) == 2)
        yield url


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


@contextmanager
def _process(
    module: str, port: int, *arguments: str, env: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Runs a service."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--port", str(port), *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _address(demo_url: str) -> str:
    [target] = _json(f"{demo_url}server_info")["targets"]
    return str(target["address"])


def _json(url: str) -> Any:
    with urllib.request.urlopen(url) as response:
        return json.load(response)


def _wait_until(is_so: Callable[[], bool]) -> None:
    """Waits for a server that may not listen yet."""
    deadline_s = time.monotonic() + 60.0
    while True:
        with contextlib.suppress(urllib.error.URLError):
            if is_so():
                return
        assert time.monotonic() < deadline_s, "the service does not come up"
        time.sleep(0.05)
