"""The same model with other token ids, and with fewer tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_SHAPE = "_shape"
_COPIED = ("generation_config.json", "tokenizer_config.json")


def renumbered(source: Path, folder: Path, order: Sequence[int]) -> Path:
    """Writes the model of `source`, whose tokenizer is byte-level, with some of its tokens.

    Args:
        order: the old id of each new id; other tokens are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for name in [key for key in tensors if key.startswith(_TABLES)]:
        rows = tensors[name]  # a packed table has its scales and its shape beside it
        if name.endswith(_SHAPE):
            tensors[name] = torch.tensor([len(order), int(rows[1])])
        else:
            tensors[name] = rows[torch.tensor(order)].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": len(order)}))
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return renumber_tokenizer(source, folder, order)


def renumber_tokenizer(source: Path, folder: Path, order: Sequence[int]) -> Path:
    """Writes the tokenizer of such a model."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(_renumbered(tokenizer, order)))
    return folder


def _renumbered(tokenizer: dict[str, Any], order: Sequence[int]) -> dict[str, Any]:
    new_ids = {old: new for new, old in enumerate(order)}
    model = tokenizer["model"]
    vocab = {token: new_ids[old] for token, old in model["vocab"].items() if old in new_ids}
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    kept = [
        [left, right]
        for left, right in merges
        if left in vocab and right in vocab and left + right in vocab
    ]
    added = [
        {**token, "id": new_ids[token["id"]]}
        for token in tokenizer["added_tokens"]
        if token["id"] in new_ids
    ]
    # The library gives added tokens that are not in the model's vocabulary ids behind it.
    vocab |= {token["content"]: token["id"] for token in added}
    return {**tokenizer, "model": {**model, "vocab": vocab, "merges": kept}, "added_tokens": added}
