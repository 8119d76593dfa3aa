"""A tiny model folder, fake targets, and the gateway in front of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from gateway.api_keys import KeyLimits, Quotas, keys_from_texts
from gateway.app import Gateway, create_app
from gateway.http_server import HttpServer, listen
from gateway.model_text import ModelText
from gateway.pool import TargetPool
from gateway.responses.store import ResponseStore
from gateway.settings import GatewaySettings
from gateway.target_link import LinkTiming
from shared.model_files import tokenizer_sha256
from shared.text import Tokenizer
from tests.gateway.driving import MakeGateway, eventually, http_client
from tests.gateway.shared_routes import share_routes
from tests.gateway.thinking_model import thinking_model
from tests.helpers.fake_target import FakeTarget

SETTINGS = GatewaySettings()
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CORPUS = ["the quick brown fox jumps over the lazy dog", "there and then the other thing"] * 20


@pytest.fixture(scope="session", autouse=True)
def shared_routes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_routes(patch)
        yield


def write_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE: `<|end|>` is token 0, characters outside ASCII are many tokens."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_model(folder: Path) -> None:
    """Writes what a gateway reads of a model."""
    write_tokenizer(folder)
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def sha256(model_folder: Path) -> str:
    return tokenizer_sha256(model_folder)


@pytest.fixture(scope="session")
def text(model_folder: Path) -> ModelText:
    return ModelText.read(model_folder)


@pytest.fixture(scope="session")
def thinking_text(text: ModelText) -> ModelText:
    return thinking_model(text)


@pytest.fixture(scope="session")
def tokenizer(text: ModelText) -> Tokenizer:
    return text.tokenizer


@pytest_asyncio.fixture
async def target(sha256: str) -> AsyncIterator[FakeTarget]:
    async with FakeTarget(sha256) as fake:
        yield fake


@pytest_asyncio.fixture
async def second_target(sha256: str) -> AsyncIterator[FakeTarget]:
    async with FakeTarget(sha256) as fake:
        yield fake


@pytest_asyncio.fixture
async def make_gateway(text: ModelText, sha256: str) -> AsyncIterator[MakeGateway]:
    """Makes gateways in front of targets, and closes them. Waits until all targets serve."""
    made: list[Gateway] = []

    async def make(
        *targets: FakeTarget,
        num_serving: int | None = None,
        settings: GatewaySettings = SETTINGS,
        api_key: str | None = None,
        quotas: Quotas | None = None,
        response_store: ResponseStore | None = None,
        text: ModelText = text,
    ) -> Gateway:
        if quotas is None:
            quotas = Quotas(keys_from_texts([api_key] if api_key else [], KeyLimits()))
        addresses = tuple(target.address for target in targets)
        timing = LinkTiming(first_backoff_s=0.01, longest_backoff_s=0.05)
        pool = TargetPool(replace(settings, target=addresses), sha256, timing)
        # No maintenance port is known of a target at a path.
        settings = replace(settings, target=("unix:/none",))
        gateway = Gateway(settings, pool, text, quotas, response_store=response_store)
        made.append(gateway)
        pool.start()
        wanted = len(targets) if num_serving is None else num_serving
        await eventually(lambda: sum(link.epoch > 0 for link in pool.links) == wanted)
        await gateway.lifecycle.activate()
        return gateway

    yield make
    for gateway in made:
        await gateway.pool.close()


@pytest_asyncio.fixture
async def gateway(make_gateway: MakeGateway, target: FakeTarget) -> Gateway:
    return await make_gateway(target)


@pytest_asyncio.fixture
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(gateway) as client:
        yield client


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Callable[[Gateway], str]]:
    """Serves gateways over real sockets; returns their URLs."""
    servers: list[HttpServer] = []

    def start(gateway: Gateway) -> str:
        server = HttpServer(create_app(gateway), listen("127.0.0.1", 0), SETTINGS)
        server.start()
        servers.append(server)
        return f"http://127.0.0.1:{server.port}"

    yield start
    for server in servers:
        await server.stop(1)


@pytest_asyncio.fixture
async def openai_client(
    gateway: Gateway, serve: Callable[[Gateway], str]
) -> AsyncIterator[AsyncOpenAI]:
    """The real client over a real socket."""
    # Without TLS certificates, whose loading takes longer than a test.
    plain = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(verify=False))
    async with AsyncOpenAI(
        base_url=f"{serve(gateway)}/v1",
        api_key="unused",
        max_retries=0,
        timeout=60.0,  # the client's own 5 s to connect are too few on a busy machine
        http_client=plain,
    ) as client:
        yield client
