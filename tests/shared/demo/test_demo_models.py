"""The committed demo checkpoints load, share one tokenizer and answer a known question."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from services.draft.training.frozen_target import load_causal_model

DEMO = Path(__file__).parents[3] / "shared" / "demo"
BOUNDS = {"target": (15_000_000, 25_000_000), "draft": (2_000_000, 5_000_000)}


@pytest.mark.parametrize("name", BOUNDS)
def test_model_loads_and_is_finite(name: str) -> None:
    model = load_causal_model(DEMO / name, torch.float32)
    low, high = BOUNDS[name]
    assert low <= sum(p.numel() for p in model.parameters()) <= high
    with torch.inference_mode():
        logits = model(torch.arange(64)[None]).logits
    assert logits.shape == (1, 64, 8192)
    assert torch.isfinite(logits).all()


def test_tokenizer_files_are_the_same_in_both_folders() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        digests = {hashlib.sha256((DEMO / n / file).read_bytes()).hexdigest() for n in BOUNDS}
        assert len(digests) == 1


def test_tokenizer_round_trip_and_specials() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    assert len(tokenizer) == 8192
    for text in ("  two  spaces\n\ttab ", "naïve 東京 🙂\u200d\r\n", "x' don't 1234", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    assert ids == [0, 1, 2]
    assert all(tokenizer.convert_tokens_to_ids(f"<|reserved_{i}|>") == 3 + i for i in range(13))


def test_ends_of_generation() -> None:
    for name in BOUNDS:
        config = json.loads((DEMO / name / "generation_config.json").read_text())
        assert config["eos_token_id"] == [2, 0]


def test_target_knows_the_capital_of_france() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    model = load_causal_model(DEMO / "target", torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|im_start|>assistant\n")
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.inference_mode():
        for _ in range(16):
            best = model(ids).logits[:, -1].argmax(-1)
            ids = torch.cat([ids, best[:, None]], dim=1)
    assert "Paris" in tokenizer.decode(ids[0])


@pytest.mark.parametrize("name", ["target", "heads/eagle", "heads/eagle3"])
def test_matrices_are_in_8_bits(name: str) -> None:
    tensors = load_file(DEMO / name / "model.safetensors")
    scales = {key for key in tensors if key.endswith("_scale")}
    matrices = {key for key, tensor in tensors.items() if tensor.ndim == 2} - scales
    assert {tensors[key].dtype for key in matrices} == {torch.int8}
    assert scales == {f"{key}_scale" for key in matrices}
    config = json.loads((DEMO / name / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"


@pytest.mark.parametrize("name", ["draft", "heads/mtp", "heads/dflash"])
def test_matrices_are_in_4_bits(name: str) -> None:
    tensors = load_file(DEMO / name / "model.safetensors")
    words = {key for key, tensor in tensors.items() if tensor.dtype == torch.int32}
    names = {key.removesuffix("_packed") for key in words}
    assert {key for key, tensor in tensors.items() if tensor.ndim == 2} == {
        f"{each}{part}" for each in names for part in ("_packed", "_scale")
    }
    config = json.loads((DEMO / name / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"


def test_folder_stays_small() -> None:
    size = sum(f.lstat().st_size for f in DEMO.rglob("*") if f.is_file())
    assert size <= 34_000_000
