"""Tiny random Hugging Face checkpoints of each supported family, written to a temporary folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Class names: processes that build no model need not import transformers, which takes seconds.
FAMILY_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "mimo_v2_flash": ("MiMoV2FlashConfig", "MiMoV2FlashForCausalLM"),
    # transformers has Step-3.5's text model only as a part of Step-3.7.
    "step3p5": ("Step3p7Config", "Step3p7ForConditionalGeneration"),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
}
DELTA: dict[str, Any] = {
    # With a smaller value, the norms of a head's first inputs would magnify rounding errors.
    "rms_norm_eps": 0.01,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
"""Config of Qwen3-Next and Qwen3.5 with linear attention layers."""
BOS_TOKEN_ID = 256
EOS_TOKEN_ID = 257
BYTE_VOCAB_SIZE = 258


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny decoder; `overrides` go to the family's config as they are."""

    vocab_size: int = BYTE_VOCAB_SIZE
    hidden_size: int = 32
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 48
    max_position_embeddings: int = 128
    tie_word_embeddings: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    shape: TinyShape | None = None,
    *,
    seed: int = 0,
    max_shard_size: str = "1GB",
    with_tokenizer: bool = False,
) -> Path:
    """Writes `config.json`, `generation_config.json` and safetensors; returns `folder`.

    Weights are drawn from `seed`, also biases and norms, so that a test notices if one is left out.
    A small `max_shard_size` writes several shards and an index.
    """
    model = build_model(family, shape, seed=seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if with_tokenizer:
        write_byte_tokenizer(folder)
    return folder


def build_model(family: str, shape: TinyShape | None = None, *, seed: int = 0) -> PreTrainedModel:
    """Returns the same model in transformers, in float32 and evaluation mode."""
    import transformers

    config_class, model_class = (getattr(transformers, name) for name in FAMILY_CLASSES[family])
    arguments = _config_arguments(shape or TinyShape())
    if family == "step3p5":
        vision = {"width": 8, "layers": 1, "heads": 2, "image_size": 28}
        arguments = {"text_config": arguments | {"pad_token_id": 0}, "vision_config": vision}
    model: PreTrainedModel = model_class(config_class(**arguments))
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    has_delta = family.startswith(("qwen3_next", "qwen3_5"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name
            if "conv1d" in name:
                # With less, the norm of the convolution's results would magnify rounding errors.
                noise *= 4.0
            center = 0.0 if has_delta and "linear_attn" not in name else 1.0
            parameter.copy_(center + 0.2 * noise if is_norm else 0.25 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def write_byte_tokenizer(folder: Path) -> Path:
    """Writes a `tokenizer.json` whose ids are the bytes of UTF-8 text, BOS 256 and EOS 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: token_id for token_id, symbol in enumerate(_byte_symbols(alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}'
    )
    return folder


def _byte_symbols(alphabet: list[str]) -> list[str]:
    """Orders the byte-level alphabet by byte: printable bytes stand for themselves."""
    printable = {ord(symbol): symbol for symbol in alphabet if ord(symbol) < 256}
    stand_ins = iter(sorted(symbol for symbol in alphabet if ord(symbol) >= 256))
    return [printable[byte] if byte in printable else next(stand_ins) for byte in range(256)]


def _config_arguments(shape: TinyShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "bos_token_id": BOS_TOKEN_ID if shape.vocab_size > BOS_TOKEN_ID else None,
        "eos_token_id": EOS_TOKEN_ID if shape.vocab_size > EOS_TOKEN_ID else None,
        "pad_token_id": None,
        **shape.overrides,
    }
