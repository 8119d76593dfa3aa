"""Next-token layers of mixtures of experts: the block inside is transformers' own layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from shared.errors import CheckpointError
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from tests.helpers.checkpoints import build_model
from tests.helpers.mixtures import MIXTURES, NUM_LAYERS, mixture_shape, write_mixture
from tests.helpers.pooled_heads import HeadRunner

CPU = torch.device("cpu")
PAGE_SIZE = 4
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]


def _expected(model: PreTrainedModel, own: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """Returns the states of rows (token, hidden state)."""
    inner: Any = model.model
    eps = model.config.rms_norm_eps
    embedded = inner.embed_tokens(torch.tensor(TOKENS))
    parts = (_normed(embedded, own["enorm"], eps), _normed(hidden, own["hnorm"], eps))
    rows = (torch.cat(parts, dim=1) @ own["eh_proj"].T).unsqueeze(0)
    positions = torch.arange(len(TOKENS)).unsqueeze(0)
    mask = torch.full((len(TOKENS), len(TOKENS)), -torch.inf).triu(1)[None, None]
    states = inner.layers[NUM_LAYERS](
        rows,
        attention_mask=mask,
        position_embeddings=inner.rotary_emb(rows, positions),
        position_ids=positions,
    )
    states = states[0] if isinstance(states, tuple) else states
    return _normed(states[0], own["shared_head.norm"], eps)


def _normed(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rows * (rows.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize("cuts", [(10,), (1,) * 10, (3, 4, 3)], ids=str)
@pytest.mark.parametrize("family", MIXTURES)
def test_the_layer_computes_what_transformers_does(
    family: str, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    own = write_mixture(tmp_path, family)
    tensors = TargetFolder(tmp_path, dtype=torch.float32, device=CPU)
    head = load_mtp(tmp_path, tensors, dtype=torch.float32, device=CPU)
    runner = HeadRunner(head, KvPool(head.kv_layout(PAGE_SIZE), 8, CPU))
    hidden = torch.randn(len(TOKENS), 32, generator=torch.Generator().manual_seed(0))
    model = build_model(family, mixture_shape(family))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = _expected(model, own, hidden)
    states, start = [], 0
    for count in cuts:
        part = slice(start, start + count)
        rows = SequenceRows.causal(TOKENS[part], start, range(1, 6))
        batch = build_batch([rows], page_size=PAGE_SIZE, device=CPU)
        states.append(runner.states(batch, hidden[part], layer=0))
        start += count
    torch.testing.assert_close(torch.cat(states), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_target_leaves_the_layer_to_its_drafter(family: str, tmp_path: Path) -> None:
    write_mixture(tmp_path, family)
    assert len(load_decoder(tmp_path, dtype=torch.float32, device=CPU).layers) == NUM_LAYERS


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    write_mixture(tmp_path, "glm4_moe")
    file, key = tmp_path / "model.safetensors", "model.layers.3.mlp.experts.5.up_proj.weight"
    save_file({name: each for name, each in load_file(file).items() if name != key}, file)
    tensors = TargetFolder(tmp_path, dtype=torch.float32, device=CPU)
    with pytest.raises(CheckpointError, match=key):
        load_mtp(tmp_path, tensors, dtype=torch.float32, device=CPU)
