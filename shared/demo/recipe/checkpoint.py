"""Writes and reads checkpoints in the Hugging Face layout, in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from shared.demo.recipe.model import Llama, Shape
from shared.demo.recipe.tokenizer import SPECIALS, TURN_END
from shared.models.checkpoint import Checkpoint

END_OF_TEXT_ID, TURN_END_ID = 0, SPECIALS.index(TURN_END)


def config(s: Shape) -> dict[str, object]:
    """``config.json`` of a ``LlamaForCausalLM`` of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocabulary,
        "max_position_embeddings": s.positions,
        "rope_theta": s.theta,
        "rms_norm_eps": s.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": [TURN_END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def save(model: Llama, folder: Path) -> None:
    """Weights in bfloat16, ``config.json`` and ``generation_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().to("cpu", torch.bfloat16).contiguous()
               for k, v in model.state_dict().items()}  # fmt: skip
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    ends = {"eos_token_id": [TURN_END_ID, END_OF_TEXT_ID], "pad_token_id": END_OF_TEXT_ID}
    (folder / "config.json").write_text(json.dumps(config(model.s), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")


def load(folder: Path, device: str, dtype: torch.dtype) -> Llama:
    """The model of a folder written by ``save``, or of one brought to few bits."""
    c = json.loads((folder / "config.json").read_text())
    shape = Shape(
        hidden=c["hidden_size"], layers=c["num_hidden_layers"], heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"], head_dim=c["head_dim"],
        intermediate=c["intermediate_size"], vocabulary=c["vocab_size"],
        positions=c["max_position_embeddings"], theta=c["rope_theta"], eps=c["rms_norm_eps"],
    )  # fmt: skip
    model = Llama(shape)
    stored = Checkpoint.open(folder)
    model.load_state_dict({key: stored.read(key) for key in stored.files})
    model = model.to(device=device, dtype=dtype).eval()
    model.cos, model.sin = (table.to(device) for table in model.tables())
    return model
