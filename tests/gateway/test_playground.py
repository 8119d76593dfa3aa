"""The page is served whole, locked down, and as nothing but itself."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import httpx
import pytest

from tests.gateway.driving import MakeGateway, http_client
from tests.helpers.fake_target import FakeTarget

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "gateway" / "playground" / "page"


async def test_the_page_is_at_the_root(client: httpx.AsyncClient) -> None:
    response = await client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.content == (FOLDER / "index.html").read_bytes()


async def test_everything_the_page_names_is_served_with_its_type(
    client: httpx.AsyncClient,
) -> None:
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    named = set(re.findall(r'(?:src|href)="(playground/[^"]+)"', (await client.get("/")).text))
    assert {Path(name).suffix for name in named} == set(types)
    unseen, seen = set(named), set()
    while unseen:
        path = unseen.pop()
        seen.add(path)
        response = await client.get(f"/{path}")
        assert response.status_code == 200, path
        assert response.headers["content-type"].startswith(types[Path(path).suffix])
        imports = re.findall(r'from "\./([^"]+)"', response.text)
        unseen |= {f"playground/{each}" for each in imports} - seen
    # Nothing lies about that no page reads.
    assert {Path(path).name for path in seen} == {each.name for each in FOLDER.iterdir()} - {
        "index.html"
    }


@pytest.mark.parametrize("path", ["/", "/playground/main.js", "/playground/icon.svg"])
async def test_the_policy_keeps_the_page_to_this_server(
    client: httpx.AsyncClient, path: str
) -> None:
    headers = (await client.get(path)).headers
    policy = dict(each.split(" ", 1) for each in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_nothing_comes_from_elsewhere() -> None:
    for file in FOLDER.iterdir():
        content = file.read_bytes()
        addresses = set(re.findall(rb"(?:https?:)?//[\w.-]+\.\w+", content))
        assert addresses <= {b"http://www.w3.org"}, file.name
        # The policy would refuse these, quietly.
        assert not re.search(rb"<[a-z][^>]* (?:style|on\w+)=", content), file.name


@pytest.mark.parametrize(
    "path",
    [
        "/playground/../app.py",
        "/playground/%2e%2e/app.py",
        "/playground/..%2froutes.py",
        "/playground/%2e%2e%2f%2e%2e%2fapp.py",
        "/playground/routes.py",
        "/playground//etc/passwd",
        "/playground/page/index.html",
        "/playground/",
        "/playground/main.js%00",
    ],
)
async def test_nothing_else_is_served(
    make_gateway: MakeGateway, target: FakeTarget, path: str
) -> None:
    gateway = await make_gateway(target)
    async with http_client(gateway) as client:
        request = client.build_request("GET", "/")
        # As it was written: httpx would tidy the dots away.
        request.url = httpx.URL("http://gateway", raw_path=path.encode())
        response = await client.send(request)
    assert response.status_code == 404
    assert set(response.json()) == {"error"}


async def test_unchanged_files_are_not_sent_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/playground/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = await client.get(
        "/playground/main.js", headers={"if-none-match": first.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")
    assert "content-security-policy" in again.headers
    other = await client.get("/playground/main.js", headers={"if-none-match": '"other"'})
    assert other.content == first.content


async def test_the_page_asks_for_no_key_and_what_it_calls_does(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    gateway = await make_gateway(target, api_key="secret")
    async with http_client(gateway) as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/playground/main.js")).status_code == 200
        for path in ("/v1/models", "/server_info", "/playground"):
            assert (await client.get(path)).status_code == 401, path


async def test_the_page_can_only_be_read(client: httpx.AsyncClient) -> None:
    assert (await client.post("/")).status_code == 405
    head = await client.head("/playground/style.css")
    assert (head.status_code, head.content) == (200, b"")


def test_the_files_are_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]
    assert data["gateway"] == ["playground/page/*"]
