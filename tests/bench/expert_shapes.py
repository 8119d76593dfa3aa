"""Published mixtures of experts by their configs, as far as a forward's cost depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.model_options import Quantisation
from shared.models.config import ModelConfig
from shared.models.config_file import ConfigFile
from shared.models.heads.mtp_loader import mtp_config
from shared.models.loader import MtpLayers, MtpStyle
from shared.models.scaled_weights import ScaleBlock


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompts that are read at once."""

    count: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A model, and the forwards that are measured of it.

    Attributes:
        values: of its config.
        quantisation: in what its matrices are held.
        block: what shares a scale in them, where that is no channel.
        context: tokens before a step.
        batches: sequences of plain steps.
        trees: nodes of the trees that are verified at batch 1.
        layers_most: layers that are built, as far as they fit.
        period: layers after which their kinds repeat; as many, or a multiple, are built.
        mtp: style of its next-token layer; None if none is published. Qwen3-Next's is left out, as
            rounds of a target with recurrent states need the states of whole contexts.
    """

    name: str
    architecture: str
    values: Mapping[str, object]
    quantisation: Quantisation
    context: int
    batches: tuple[int, ...]
    trees: tuple[int, ...]
    prompt: Prompt
    layers_most: int
    period: int = 1
    block: ScaleBlock | None = None
    mtp: MtpStyle | None = None

    def config(self, num_layers: int) -> ModelConfig:
        """Returns the config of a model of so many of its layers."""
        return ModelConfig.of(self._file(num_layers), self.architecture)

    def mtp_layers(self, num_layers: int) -> tuple[ModelConfig, MtpLayers]:
        """Returns config and keys of the next-token layer of such a model."""
        assert self.mtp is not None
        layers = MtpLayers(self.mtp, (f"{self.mtp.value}{num_layers}.",))
        return mtp_config(self.config(num_layers), self._file(num_layers), layers), layers

    def _file(self, num_layers: int) -> ConfigFile:
        values = {**self.values, "num_hidden_layers": num_layers, "tie_word_embeddings": False}
        return ConfigFile(Path(self.name), values)


QWEN3_30B = ExpertShape(
    name="qwen3-30b-a3b",
    architecture="Qwen3MoeForCausalLM",
    values={
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rope_theta": 1_000_000,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
    },
    quantisation=Quantisation.UNQUANT,
    context=512,
    batches=(1, 8, 64),
    trees=(8, 32),
    prompt=Prompt(8, 2048),
    layers_most=48,
)
GLM_45_AIR = ExpertShape(
    name="glm-4.5-air",
    architecture="Glm4MoeForCausalLM",
    values={
        "hidden_size": 4096,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rope_theta": 1_000_000,
        "vocab_size": 151_552,
        "max_position_embeddings": 131_072,
    },
    quantisation=Quantisation.FP8,
    context=512,
    batches=(1, 8, 64),
    trees=(8, 32),
    prompt=Prompt(8, 2048),
    layers_most=46,
    mtp=MtpStyle.DEEPSEEK,
)
# Its first three layers are dense; those that are measured have experts.
DEEPSEEK_V3 = ExpertShape(
    name="deepseek-v3",
    architecture="DeepseekV3ForCausalLM",
    values={
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "rope_theta": 10_000,
        "vocab_size": 129_280,
        "max_position_embeddings": 163_840,
    },
    quantisation=Quantisation.FP8,
    context=8192,
    batches=(1, 64),
    trees=(8, 32),
    prompt=Prompt(1, 2048),
    layers_most=58,
    block=ScaleBlock(128, 128),
    mtp=MtpStyle.DEEPSEEK,
)
QWEN3_NEXT = ExpertShape(
    name="qwen3-next-80b-a3b",
    architecture="Qwen3NextForCausalLM",
    values={
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "rope_theta": 10_000_000,
        "vocab_size": 151_936,
        "max_position_embeddings": 262_144,
    },
    quantisation=Quantisation.UNQUANT,
    context=512,
    batches=(1, 8, 64),
    trees=(8, 32),
    prompt=Prompt(8, 2048),
    layers_most=48,
    period=4,
)
SHAPES = {shape.name: shape for shape in (QWEN3_30B, GLM_45_AIR, DEEPSEEK_V3, QWEN3_NEXT)}
