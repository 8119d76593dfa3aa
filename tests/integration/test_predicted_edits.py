"""An answer of the demo that its client knows but for some edits: through gateway, wire, target."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.api_keys import KeyLimits, Quotas
from gateway.model_text import ModelText
from gateway.pool import TargetPool
from gateway.serving import Gateway
from gateway.settings import GatewaySettings
from services.target.__main__ import read_settings
from services.target.engine_factory import build_engine
from services.target.process import TargetProcess
from services.target.settings import DEMO_MODEL
from shared.model_files import tokenizer_sha256
from tests.gateway.driving import eventually, http_client

FLAGS = [
    *("--port", "0", "--maintenance-port", "0", "--device", "cpu", "--served-model-name", "demo"),
    *("--max-total-tokens", "4096", "--context-length", "640"),
]
PROMPTS = ("Tell me a story about a fox.", "Explain how rain forms.")
WORDS_AN_EDIT = 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    settings, _ = read_settings(FLAGS, {})
    sha256 = tokenizer_sha256(DEMO_MODEL)
    process = TargetProcess(build_engine(settings, lambda report: None), settings, sha256)
    await process.start()
    pool = TargetPool(GatewaySettings(target=(f"127.0.0.1:{process.port}",)), sha256)
    quotas = Quotas([], KeyLimits())
    gateway = Gateway(
        pool=pool,
        text=ModelText.read(DEMO_MODEL),
        settings=GatewaySettings(),
        quotas=quotas,
    )
    pool.start()
    await eventually(lambda: pool.is_serving)
    await gateway.lifecycle.activate()
    async with http_client(gateway) as client:
        yield client
    await pool.close()
    await process.stop(grace_s=0.0)


def _before_edits(text: str) -> str:
    """Returns what the text may have been before somebody asked for changes: of every 16 words one
    is another, one more is there, or two are missing."""
    source, words = random.Random(5), text.split(" ")
    for place in range(WORDS_AN_EDIT // 2, len(words), WORDS_AN_EDIT):
        words[place] = source.choice(["", "indeed", f"old {words[place]}"])
        if not words[place] and place + 1 < len(words):
            words[place + 1] = "then"
    return " ".join(word for word in words if word)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_an_edit_is_accepted_in_long_runs(
    client: httpx.AsyncClient, temperature: float
) -> None:
    num_accepted = num_rounds = num_output = 0
    for prompt in PROMPTS:
        body: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 220,
            "temperature": temperature,
            "seed": 3,
        }
        plain = (await client.post("/v1/chat/completions", json=body)).json()
        text = plain["choices"][0]["message"]["content"]
        predicted = {"type": "content", "content": _before_edits(text)}
        told = (
            await client.post("/v1/chat/completions", json={**body, "prediction": predicted})
        ).json()
        assert told["choices"][0]["message"]["content"] == text
        figures = told["metrics"]["speculative_decoding"]
        num_accepted += figures["num_accepted_draft_tokens"]
        num_rounds += figures["num_spec_steps"]
        num_output += told["usage"]["completion_tokens"]
        details = told["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == figures["num_accepted_draft_tokens"]
    assert num_accepted / num_rounds >= 6
    assert num_accepted >= 0.7 * num_output
