"""Next-token layers of MiMo-V2-Flash: several, which slide with sinks and are dense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.kernels.pointwise import rms_norm
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.pooled_heads import HeadRunner

CPU = torch.device("cpu")
PAGE_SIZE, NUM_LAYERS, NUM_OWN = 4, 2, 2
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 11, 2]


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}


SHAPE = TinyShape(
    vocab_size=64,
    num_layers=NUM_LAYERS + NUM_OWN,
    overrides={
        "head_dim": 12,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "sliding_window": 6,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "mlp_layer_types": ["dense", "sparse", "dense", "dense"],
        "rope_parameters": {"full_attention": _rope(500.0), "sliding_attention": _rope(50.0)},
    },
)


def _moved(key: str) -> str:
    """Returns the key in a published checkpoint of one of the decoder's last layers."""
    for own in range(NUM_OWN):
        key = key.replace(f"model.layers.{NUM_LAYERS + own}.", f"model.mtp.layers.{own}.")
    if key.startswith("model.mtp."):
        key = key.replace("post_attention_layernorm", "pre_mlp_layernorm")
    return key


def _write(source: Path, folder: Path) -> dict[str, Tensor]:
    """Turns the last layers of a checkpoint into next-token layers; returns their own tensors."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types"):
        config[name] = config[name][:NUM_LAYERS]
    config["num_hidden_layers"] = NUM_LAYERS
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(3)
    sizes = {"enorm": (32,), "hnorm": (32,), "final_layernorm": (32,), "eh_proj": (32, 64)}
    own = {
        f"model.mtp.layers.{index}.{name}.weight": float("norm" in name)
        + 0.25 * torch.randn(size, generator=draw)
        for index in range(NUM_OWN)
        for name, size in sizes.items()
    }
    tensors = {_moved(key): each for key, each in load_file(source / "model.safetensors").items()}
    save_file(tensors | own, folder / "model.safetensors")
    return own


@torch.no_grad()
def test_layers_compute_what_the_decoders_own_do(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "whole", "mimo_v2_flash", SHAPE)
    own = _write(tmp_path / "whole", tmp_path / "cut")
    whole = load_decoder(tmp_path / "whole", dtype=torch.float32, device=CPU)
    tensors = TargetFolder(tmp_path / "cut", dtype=torch.float32, device=CPU)
    head = load_mtp(tmp_path / "cut", tensors, dtype=torch.float32, device=CPU)
    assert len(head.layers) == NUM_OWN
    rows = SequenceRows.causal(TOKENS, 0, range(1, 5))
    batch = build_batch([rows], page_size=PAGE_SIZE, device=CPU)
    hidden = torch.randn(len(TOKENS), 32, generator=torch.Generator().manual_seed(0))
    runner = HeadRunner(head, KvPool(head.kv_layout(PAGE_SIZE), 8, CPU))
    pool = KvPool(whole.kv_layout(PAGE_SIZE), 8, CPU)
    context = whole._context(batch, pool, None, has_routes=False)
    for index in range(NUM_OWN):
        weights = {
            name: own[f"model.mtp.layers.{index}.{name}.weight"]
            for name in ("enorm", "hnorm", "final_layernorm", "eh_proj")
        }
        eps = whole.config.rms_norm_eps
        embedded = whole.embedding[torch.tensor(TOKENS)]
        normed = (
            rms_norm(embedded, weights["enorm"], eps),
            rms_norm(hidden, weights["hnorm"], eps),
        )
        inputs = torch.cat(normed, dim=1) @ weights["eh_proj"].T
        states = whole.layers[NUM_LAYERS + index](inputs, context)
        expected = rms_norm(states, weights["final_layernorm"], eps)
        found = runner.states(batch, hidden, layer=index)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_target_leaves_them_to_its_drafter(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "whole", "mimo_v2_flash", SHAPE)
    _write(tmp_path / "whole", tmp_path / "cut")
    decoder = load_decoder(tmp_path / "cut", dtype=torch.float32, device=CPU)
    assert len(decoder.layers) == NUM_LAYERS
