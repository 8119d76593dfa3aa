"""One request, three services: one trace, one id in every log."""

from __future__ import annotations

import logging
from pathlib import Path

import httpx
import pytest

from gateway.api_keys import Quotas
from gateway.app import Gateway, create_app
from gateway.model_text import ModelText
from gateway.pool import TargetPool
from gateway.settings import GatewaySettings
from services.draft.drafter_factory import build_drafter
from services.draft.events import WorkerIdentity
from services.draft.metrics import DraftRecorder
from services.draft.process import DraftProcess
from services.draft.settings import DraftSettings
from services.target.engine_factory import build_engine
from services.target.process import TargetProcess
from services.target.settings import TargetSettings
from shared.model_files import tokenizer_sha256
from shared.settings import load_settings
from shared.telemetry.tracing import current_request_id
from tests.gateway.driving import eventually
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.kept_spans import PARENT, KeptSpans


class _Lines(logging.Handler):
    """Keeps the logger and the request id of each line."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.name, current_request_id.get()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = TinyShape(vocab_size=300)
    return write_checkpoint(tmp_path / "model", "llama", shape, seed=3, with_tokenizer=True)


async def test_gateway_target_and_draft_share_a_trace_and_an_id(folder: Path) -> None:
    spans = {name: KeptSpans(name) for name in ("gateway", "target", "draft")}
    sha256 = tokenizer_sha256(folder)
    settings = TargetSettings(
        model_path=folder,
        port=0,
        device="cpu",
        max_total_tokens=1024,
        context_length=256,
        candidate_wait_sequences=99,  # the sequence stays at the draft
    )
    target = TargetProcess(
        build_engine(settings, lambda report: None),
        settings,
        sha256,
        tracer=spans["target"].tracer,
    )
    await target.start()
    address = f"127.0.0.1:{target.port}"
    arguments = ["--port", "0", "--target", address, "--speculative-algorithm", "NGRAM"]
    chosen = load_settings(DraftSettings, service="draft", arguments=arguments, env={})
    draft = DraftProcess(chosen, DraftRecorder(spans["draft"].tracer))
    await draft.listen()
    await draft.serve(
        build_drafter(chosen), WorkerIdentity("worker", "ngram", "NGRAM", None, 8, None)
    )
    pool = TargetPool(GatewaySettings(target=(address,)), sha256)
    pool.start()
    lines = _Lines()
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(lines)
    root.setLevel(logging.INFO)
    try:
        await eventually(lambda: pool.is_serving and draft.num_attached == 1)
        gateway = Gateway(
            pool=pool,
            text=ModelText.read(folder),
            settings=GatewaySettings(),
            quotas=Quotas(),
            tracer=spans["gateway"].tracer,
        )
        headers = {"x-request-id": "abc", "traceparent": PARENT}
        body = {"prompt": [1, 2, 3, 1, 2, 3], "max_tokens": 20, "ignore_eos": True}
        transport = httpx.ASGITransport(create_app(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        await eventually(lambda: bool(spans["draft"].ended))
    finally:
        await pool.close()
        await draft.stop()
        await target.stop(0.0)
        root.removeHandler(lines)
        root.setLevel(level)
    [outer], [middle], [inner] = (spans[name].ended for name in ("gateway", "target", "draft"))
    assert (outer.name, middle.name, inner.name) == (
        "gateway.completions",
        "target.generate",
        "draft.sequence",
    )
    assert {each.trace_id for each in (outer, middle, inner)} == {PARENT.split("-")[1]}
    assert outer.parent_id == PARENT.split("-")[2]
    assert middle.parent_id == outer.span_id
    assert inner.parent_id == middle.span_id
    assert inner.attributes["outrider.num_rounds"] > 0
    for name in (
        "gateway.metrics",
        "services.target.requests.admission",
        "services.draft.metrics",
    ):
        assert (name, "abc") in lines.lines
