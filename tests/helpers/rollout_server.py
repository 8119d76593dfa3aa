"""A gateway in front of real targets with a tiny model, for tests of a trainer's calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gateway.api_keys import Quotas
from gateway.app import Gateway, create_app
from gateway.model_text import ModelText
from gateway.pool import TargetPool
from gateway.settings import GatewaySettings
from gateway.target_link import LinkTiming
from services.target.process import TargetProcess
from shared.model_files import tokenizer_sha256
from tests.gateway.driving import eventually
from tests.helpers.served import target_process

ASK: dict[str, Any] = {
    "input_ids": [10, 20, 30, 40, 50, 60, 70],
    "sampling_params": {
        "temperature": 0.7, "max_new_tokens": 24, "sampling_seed": 7, "ignore_eos": True,
    },
}  # fmt: skip


@dataclass
class Server:
    """A gateway and its targets."""

    gateway: Gateway
    client: httpx.AsyncClient
    targets: list[TargetProcess]

    async def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        response = await self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def get(self, path: str, status: int = 200, **query: str) -> Any:
        response = await self.client.get(path, params=query)
        assert response.status_code == status, response.text
        return response.json()

    async def ask(self, **changes: Any) -> Any:
        return await self.post("/generate", {**ASK, **changes})

    async def versions(self) -> list[str]:
        """Returns the weight version of each target."""
        targets = (await self.get("/get_weight_version"))["targets"].values()
        return [target["weight_version"] for target in targets]


def client_from(gateway: Gateway, host: str = "127.0.0.1", key: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(
        create_app(gateway), raise_app_exceptions=False, client=(host, 9)
    )
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(
        transport=transport, base_url="http://gateway", timeout=60.0, headers=headers
    )


@asynccontextmanager
async def rollout_server(
    folder: Path, count: int = 1, flags: tuple[str, ...] = ()
) -> AsyncIterator[Server]:
    sha256 = tokenizer_sha256(folder)
    arguments = [
        *("--model-path", str(folder), "--port", "0", "--device", "cpu", "--context-length", "128"),
        *("--max-total-tokens", "1024", "--served-model-name", "tiny", *flags),
    ]
    async with AsyncExitStack() as opened:
        targets = []
        for _ in range(count):
            target = target_process(arguments, opened)
            await target.start()
            opened.push_async_callback(target.stop, grace_s=0.0)
            targets.append(target)
        addresses = tuple(f"127.0.0.1:{target.port}" for target in targets)
        maintenance = tuple(f"127.0.0.1:{target.admin_port}" for target in targets)
        settings = GatewaySettings(target=addresses, target_maintenance=maintenance)
        timing = LinkTiming(first_backoff_s=0.01, longest_backoff_s=0.05)
        pool = TargetPool(settings, sha256, timing)
        gateway = Gateway(settings, pool, ModelText.read(folder, 100_000), Quotas())
        await gateway.lifecycle.activate()
        pool.start()
        opened.push_async_callback(pool.close)
        await eventually(lambda: all(link.state.value == "serving" for link in pool.links))
        async with client_from(gateway) as client:
            yield Server(gateway, client, targets)
