"""`return_routed_experts` of /generate: the experts that transformers' router takes."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.target.__main__ import read_settings
from services.target.engine_factory import build_engine
from shared.errors import SettingsError
from tests.helpers.checkpoints import TinyShape, write_byte_tokenizer, write_checkpoint
from tests.helpers.draft_heads import TinyHead, write_head
from tests.helpers.rollout_server import ASK, rollout_server

NUM_LAYERS, NUM_CHOSEN = 4, 2
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": NUM_CHOSEN,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}
ON = "--enable-return-routed-experts"
NGRAM = ("--draft", "embedded", "--speculative-algorithm", "NGRAM", "--candidate-wait-sequences=99")


def _write(folder: Path, family: str, overrides: dict[str, Any]) -> Path:
    shape = TinyShape(vocab_size=300, num_layers=NUM_LAYERS, overrides=overrides)
    write_checkpoint(folder, family, shape)
    return write_byte_tokenizer(folder)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("mixture"), "qwen3_moe", EXPERTS)


def _routes(answer: Any) -> np.ndarray[Any, Any]:
    """As trainers read them."""
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    return flat.reshape(-1, NUM_LAYERS, NUM_CHOSEN)


def _expected(folder: Path, token_ids: list[int]) -> np.ndarray[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    taken: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda module, given, found, index=index: taken.update({index: found})
            )
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    rows = np.zeros((len(token_ids), NUM_LAYERS, NUM_CHOSEN), np.int32)
    for index, found in taken.items():
        logits = found[0] if isinstance(found, tuple) else found
        rows[:, index] = logits.view(len(token_ids), -1).topk(NUM_CHOSEN).indices.numpy()
    return rows


@pytest.fixture(params=["plain", "ngram", "lanes", "lanes of stages"])
def flags(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    if not request.param.startswith("lanes"):
        return NGRAM if request.param == "ngram" else ()
    hidden = TinyShape().hidden_size
    head = TinyHead(kind="EAGLE", vocab_size=300, hidden_size=hidden, target_hidden_size=hidden)
    write_head(tmp_path / "head", head)
    return (
        *("--draft", "embedded", "--speculative-algorithm", "EAGLE", "--device-rounds", "on"),
        *("--speculative-draft-model-path", str(tmp_path / "head")),
        "--candidate-wait-sequences=99",
        *(("--tp-size", "2", "--pp-size", "2") if request.param == "lanes of stages" else ()),
    )


async def test_every_token_but_the_last_has_its_experts(
    flags: tuple[str, ...], mixture: Path
) -> None:
    async with rollout_server(mixture, flags=(ON, *flags)) as server:
        info = await server.get("/server_info")
        assert info["tp_size"] == info["pp_size"] == (2 if "--pp-size" in flags else 1)
        plain = await server.ask()
        assert "routed_experts" not in plain["meta_info"]
        # The prompt is cached by now, by one whose experts need not have been recorded.
        first = await server.ask(return_routed_experts=True)
        assert first["output_ids"] == plain["output_ids"]
        token_ids = [*ASK["input_ids"], *first["output_ids"]]
        expected = _expected(mixture, token_ids[:-1])
        assert (np.sort(_routes(first)) == np.sort(expected)).all()
        assert not _routes(first)[:, 1].any(), "that layer has no experts"
        again = await server.ask(return_routed_experts=True, input_ids=token_ids)
        assert again["meta_info"]["cached_tokens"] > 0
        found = _routes(again)
        assert (found[: len(expected)] == _routes(first)).all()
        assert len(found) == len(token_ids) + len(again["output_ids"]) - 1


async def test_who_cannot_tell_refuses_by_name(mixture: Path, tmp_path: Path) -> None:
    async with rollout_server(mixture) as server:
        refused = await server.post("/generate", {**ASK, "return_routed_experts": True}, status=400)
        assert "--enable-return-routed-experts" in refused["error"]["message"]
    async with rollout_server(mixture, flags=(ON,)) as server:
        body = {**ASK, "return_routed_experts": True}
        body["sampling_params"] = {**ASK["sampling_params"], "stop": "x"}
        refused = await server.post("/generate", body, status=400)
        assert "stop_token_ids" in refused["error"]["message"]
    dense = _write(tmp_path / "dense", "llama", {})
    settings, _ = read_settings(["--model-path", str(dense), "--device", "cpu", ON], {})
    with pytest.raises(SettingsError, match="has no experts"):
        build_engine(settings, lambda report: None)
