"""Next-token layers of Qwen3-Next, Qwen3.5 and Step-3.5 against transformers' blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import CheckpointError
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.heads.head import DraftHead
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from tests.helpers.family_mtp import FAMILY_MTPS, FamilyOracle, write_family_mtp
from tests.helpers.pooled_heads import HeadRunner

CPU = torch.device("cpu")
PAGE_SIZE = 4
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43]


def load(folder: Path) -> DraftHead:
    tensors = TargetFolder(folder, dtype=torch.float32, device=CPU)
    return load_mtp(folder, tensors, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("cuts", [(16,), (1,) * 16, (5, 4, 7)], ids=str)
@pytest.mark.parametrize("name", FAMILY_MTPS)
def test_layers_compute_what_transformers_does(
    name: str, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    """Each reads what the one before hands on: Step's without the norm behind the block."""
    mtp = FAMILY_MTPS[name]
    oracle = FamilyOracle(mtp, write_family_mtp(tmp_path, mtp))
    head = load(tmp_path)
    assert len(head.layers) == mtp.count
    assert head.feature_spec.layer_indices == (mtp.num_layers + (0 if mtp.is_step else 1),)
    runner = HeadRunner(head, KvPool(head.kv_layout(PAGE_SIZE), 8, CPU))
    hidden = torch.randn(len(TOKENS), 32, generator=torch.Generator().manual_seed(0))
    for layer in range(mtp.count):
        expected = oracle.states(layer, TOKENS, hidden)
        parts, start = [], 0
        for count in cuts:
            part = slice(start, start + count)
            rows = SequenceRows.causal(TOKENS[part], start, range(1, 6))
            batch = build_batch([rows], page_size=PAGE_SIZE, device=CPU)
            parts.append(runner.states(batch, hidden[part], layer=layer))
            start += count
        states = torch.cat(parts)
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
        logits = runner.logits(states, layer)
        torch.testing.assert_close(logits, oracle.logits(expected, layer), rtol=1e-4, atol=1e-4)
        hidden = expected


@pytest.mark.parametrize("name", FAMILY_MTPS)
def test_the_target_leaves_the_layers_to_its_drafter(name: str, tmp_path: Path) -> None:
    mtp = FAMILY_MTPS[name]
    write_family_mtp(tmp_path, mtp)
    decoder = load_decoder(tmp_path, dtype=torch.float32, device=CPU)
    assert len(decoder.layers) == mtp.num_layers


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("qwen3.5", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2; .* have 1"),
        ("qwen3.5", {"mtp_use_dedicated_embeddings": True}, "dedicated_embeddings is true"),
        ("step 3.5", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; .* have 3"),
        (
            "step 3.5",
            {"layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"]},
            "some of 3 next-token layers have a sliding window",
        ),
        (
            "step 3.5",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has 2 entries for 5 layers",
        ),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    name: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    write_family_mtp(tmp_path, FAMILY_MTPS[name])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=problem):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen3-next", "mtp.fc.weight"),
        ("qwen3-next", "mtp.layers.0.mlp.shared_expert_gate.weight"),
        ("step 3.5", "model.layers.3.self_attn.g_proj.weight"),
    ],
)
def test_a_tensor_that_is_missing_is_named(name: str, key: str, tmp_path: Path) -> None:
    write_family_mtp(tmp_path, FAMILY_MTPS[name])
    file = tmp_path / "model.safetensors"
    save_file({each: value for each, value in load_file(file).items() if each != key}, file)
    with pytest.raises(CheckpointError, match=key):
        load(tmp_path)
