"""Tiny models under the model names of launch lines, in a cache of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.helpers.checkpoints import (
    BYTE_VOCAB_SIZE,
    TinyShape,
    write_byte_tokenizer,
    write_checkpoint,
)
from tests.helpers.dflash_heads import TinyDflash, write_dflash
from tests.helpers.draft_heads import TinyHead, write_head
from tests.helpers.hub_cache import add_to_cache
from tests.helpers.mtp_heads import TinyMtp, write_mtp

_SHAPE = TinyShape(num_layers=6)
_FAMILIES = {
    "meta-llama/Llama-2-7b-chat-hf": "llama",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "llama",
    "meta-llama/Llama-3.1-8B-Instruct": "llama",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2",
}
_EAGLE_HEADS = ("lmsys/sglang-EAGLE-llama2-chat-7B", "lmsys/sglang-EAGLE-LLaMA3-Instruct-8B")


def write_stand_ins(cache: Path, scratch: Path) -> None:
    """Fills `cache` with a model for each name, and `scratch` with `<your-model>` and its draft."""
    for place, (name, family) in enumerate(_FAMILIES.items()):
        add_to_cache(cache, name, _target(scratch / f"target-{place}", family))
    for place, name in enumerate(_EAGLE_HEADS):
        add_to_cache(cache, name, _head(scratch / f"eagle-{place}", "EAGLE"))
    add_to_cache(
        cache, "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B", _head(scratch / "e3", "EAGLE3")
    )
    block_head = write_dflash(scratch / "dflash", TinyDflash(vocab_size=BYTE_VOCAB_SIZE))
    add_to_cache(cache, "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", block_head)
    mimo = write_mtp(scratch / "mimo", TinyMtp(style="mimo", shape=_SHAPE))
    add_to_cache(cache, "XiaomiMiMo/MiMo-7B-RL", write_byte_tokenizer(mimo))
    token_map = scratch / "map"
    token_map.mkdir()
    torch.save(list(range(64)), token_map / "freq_32768.pt")
    add_to_cache(cache, "thunlp/LLaMA3-Instruct-8B-FR-Spec", token_map)
    _target(scratch / "<your-model>", "llama")
    _head(scratch / "<your-draft-model>", "EAGLE")


def _target(folder: Path, family: str) -> Path:
    return write_checkpoint(folder, family, _SHAPE, with_tokenizer=True)


def _head(folder: Path, kind: str) -> Path:
    return write_head(
        folder, TinyHead(kind=kind, vocab_size=BYTE_VOCAB_SIZE, draft_vocab_size=None)
    )
