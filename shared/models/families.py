"""The differences between the supported decoder families, as data."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from shared.kernels.pointwise import Activation
from shared.kernels.routing import RouterScores
from shared.models.config_file import ConfigFile
from shared.models.layer_configs import ExpertFamily, ExpertKeys, RopeDefaults, read_qwen, read_step


class WindowRule(enum.Enum):
    """Rule for the layers that attend to a sliding window only."""

    NEVER = "never"
    EVERY_LAYER = "every layer, if the config has a window"
    SWITCHED = "the layers the config names, if it switches windows on"
    PATTERN = "the layers the config names, else all except every n-th"


class NormPlacement(enum.Enum):
    """Where the norms of a layer's blocks stand: before a block, after it, or both."""

    BEFORE = "its input"
    AFTER = "its output"
    AROUND = "both"


class QkNorm(enum.Enum):
    """The norm of queries and keys before rotation."""

    NONE = "no norm"
    HEAD = "each head by itself"
    ASKED = "each head by itself, if the config says use_qk_norm"
    ALL_HEADS = "all heads at once"


@dataclass(frozen=True, slots=True)
class Family:
    """Properties in which a model family differs from Llama.

    Attributes:
        qkv_bias: whether queries, keys and values have a bias; None reads it from the config.
        output_bias: whether the attention output has a bias; None reads it from the config.
        qk_norm: how queries and keys are normed.
        window_rule: which layers have a sliding window.
        window_period: n of `WindowRule.PATTERN`.
        default_head_dim: None divides the hidden size by the number of heads.
        norms: where blocks are normed.
        norm_offset: added to the weight of every norm.
        scales_embedding: embeddings are multiplied by the root of the hidden size.
        has_fused_matrices: the checkpoint has queries, keys and values as one matrix, and gate
            and up as one.
        rope: rotary parameters of configs without them.
        sliding_rope: likewise of sliding layers; None gives them those of the other layers.
        is_latent: keys and values are made of a latent vector, see `LatentAttention`.
        reads: renames a config's keys to those of the other families; None where they are the same.
        has_head_gates: see `Attention.head_gate`.
        has_raw_mtp: next-token layers read and return the residual stream before the final norm;
            else after it.
        is_gated: see `Attention.is_gated`.
        has_delta: some layers have a gated delta rule in place of attention, see `DeltaConfig`.
        has_fused_delta: the checkpoint has the projections of a delta layer as two matrices,
            grouped by key heads; else as four.
        is_hybrid: sliding layers have other key heads than the rest, see `HybridConfig`.
        skips_rotation: some layers do not rotate, and the others attend in chunks.
        mlp_block: prefix of a feed-forward block's keys within the layer.
        sinks_key: key of the attention sinks in checkpoints.
        activation: None reads it from the config.
        has_sinks: heads have a score without a value, see `paged_attention`.
        experts: the experts of its layers; None in dense families.
        defaults: values of keys that configs may leave out, besides the defaults of all families.
    """

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: QkNorm = QkNorm.NONE
    window_rule: WindowRule = WindowRule.NEVER
    window_period: int = 1
    default_head_dim: int | None = None
    norms: NormPlacement = NormPlacement.BEFORE
    norm_offset: float = 0.0
    scales_embedding: bool = False
    has_fused_matrices: bool = False
    rope: RopeDefaults = RopeDefaults()  # noqa: RUF009 - frozen
    sliding_rope: RopeDefaults | None = None
    activation: Activation | None = None
    has_sinks: bool = False
    is_latent: bool = False
    is_hybrid: bool = False
    skips_rotation: bool = False
    reads: Callable[[ConfigFile], ConfigFile] | None = None
    has_head_gates: bool = False
    has_raw_mtp: bool = False
    is_gated: bool = False
    has_delta: bool = False
    has_fused_delta: bool = False
    mlp_block: str = "mlp."
    sinks_key: str = "sinks"
    experts: ExpertFamily | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)


_WINDOW_4096: dict[str, object] = {"sliding_window": 4096}
_EPS: dict[str, object] = {"rms_norm_eps": 1e-5}
_GEMMA: dict[str, object] = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA2 = Family(
    window_rule=WindowRule.PATTERN,
    window_period=2,
    default_head_dim=256,
    norms=NormPlacement.AROUND,
    norm_offset=1.0,
    scales_embedding=True,
    defaults=_GEMMA
    | _WINDOW_4096
    | {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
    },
)
_GEMMA3 = Family(
    qk_norm=QkNorm.HEAD,
    window_rule=WindowRule.PATTERN,
    window_period=6,
    default_head_dim=256,
    norms=NormPlacement.AROUND,
    norm_offset=1.0,
    scales_embedding=True,
    rope=RopeDefaults(theta=1e6),
    sliding_rope=RopeDefaults(theta_key="rope_local_base_freq"),
    # Configs that have a vision model too leave out keys whose values are these defaults.
    defaults=_GEMMA
    | _WINDOW_4096
    | {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131_072,
    },
)
_LLAMA4 = Family(
    skips_rotation=True,
    mlp_block="feed_forward.",
    default_head_dim=128,
    rope=RopeDefaults(theta=500_000.0, is_interleaved=True),
    experts=ExpertFamily(
        keys=ExpertKeys(block="feed_forward.", router="router", shared="shared_expert."),
        scores=RouterScores.SIGMOID,
        normalises=False,
        is_stacked=True,
        scales_inputs=True,
    ),
    defaults=_EPS | {"n_shared_experts": 1, "intermediate_size_mlp": 16_384},
)
_STEP = Family(
    qk_norm=QkNorm.HEAD,
    window_rule=WindowRule.PATTERN,
    default_head_dim=128,
    norm_offset=1.0,
    sliding_rope=RopeDefaults(),
    reads=read_step,
    has_head_gates=True,
    has_raw_mtp=True,
    experts=ExpertFamily(
        keys=ExpertKeys(
            block="moe.",
            shared="share_expert.",
            correction="router_bias",
            has_shared_apart=True,
        ),
        scores=RouterScores.SIGMOID,
        normalises=True,
        has_correction=True,
        is_wide=True,
        is_stacked_apart=True,
    ),
    defaults=_EPS | {"sliding_window": 512, "share_expert_dim": 1280},
)
_DELTA: dict[str, object] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_QWEN3_5 = Family(
    qk_norm=QkNorm.HEAD,
    default_head_dim=256,
    norm_offset=1.0,
    rope=RopeDefaults(partial=0.25),
    reads=read_qwen,
    is_gated=True,
    has_delta=True,
    defaults=_DELTA,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    experts=ExpertFamily(
        keys=ExpertKeys(shared="shared_expert.", shared_gate="shared_expert_gate"),
        scores=RouterScores.SOFTMAX,
        normalises=True,
        may_be_stacked=True,
    ),
    defaults=_DELTA
    | {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)
_QWEN3_NEXT = replace(
    _QWEN3_5,
    has_fused_delta=True,
    experts=ExpertFamily(
        keys=ExpertKeys(shared="shared_expert.", shared_gate="shared_expert_gate"),
        scores=RouterScores.SOFTMAX,
    ),
    defaults=_DELTA | {"norm_topk_prob": True, "shared_expert_intermediate_size": 512},
)
_CORRECTED = ExpertFamily(scores=RouterScores.SIGMOID, has_correction=True, is_wide=True)
_OLMO2 = Family(
    qk_norm=QkNorm.ALL_HEADS,
    norms=NormPlacement.AFTER,
    defaults=_EPS,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(),
        "Llama4ForCausalLM": _LLAMA4,
        "Llama4ForConditionalGeneration": _LLAMA4,
        "MistralForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            window_rule=WindowRule.EVERY_LAYER,
            defaults=_WINDOW_4096,
        ),
        "Qwen2ForCausalLM": Family(
            qkv_bias=True,
            output_bias=False,
            window_rule=WindowRule.SWITCHED,
            defaults=_WINDOW_4096,
        ),
        "Qwen3ForCausalLM": Family(
            qk_norm=QkNorm.HEAD,
            window_rule=WindowRule.SWITCHED,
            default_head_dim=128,
            defaults=_WINDOW_4096,
        ),
        "MiMoForCausalLM": Family(
            qkv_bias=True,
            output_bias=False,
            window_rule=WindowRule.SWITCHED,
            defaults=_WINDOW_4096,
        ),
        "Gemma2ForCausalLM": _GEMMA2,
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma3ForConditionalGeneration": _GEMMA3,
        "Phi3ForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            window_rule=WindowRule.EVERY_LAYER,
            has_fused_matrices=True,
            defaults=_EPS,
        ),
        "MixtralForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            window_rule=WindowRule.EVERY_LAYER,
            rope=RopeDefaults(theta=1e6),
            experts=ExpertFamily(
                keys=ExpertKeys(block="block_sparse_moe.", gate="w1", up="w3", down="w2"),
                scores=RouterScores.SOFTMAX,
                normalises=True,
            ),
            defaults=_EPS,
        ),
        "Qwen3MoeForCausalLM": Family(
            qk_norm=QkNorm.HEAD,
            window_rule=WindowRule.SWITCHED,
            experts=ExpertFamily(scores=RouterScores.SOFTMAX),
            defaults=_WINDOW_4096,
        ),
        "Qwen3NextForCausalLM": _QWEN3_NEXT,
        "Qwen3_5ForCausalLM": _QWEN3_5,
        "Qwen3_5ForConditionalGeneration": _QWEN3_5,
        "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
        "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
        "Glm4MoeForCausalLM": Family(
            output_bias=False,
            qk_norm=QkNorm.ASKED,
            rope=RopeDefaults(partial=0.5),
            experts=_CORRECTED,
            defaults=_EPS | {"norm_topk_prob": True},
        ),
        "DeepseekV2ForCausalLM": Family(
            is_latent=True,
            rope=RopeDefaults(is_interleaved=True),
            experts=ExpertFamily(scores=RouterScores.SOFTMAX, is_wide=True),
            defaults={"topk_method": "greedy"},
        ),
        "DeepseekV3ForCausalLM": Family(
            is_latent=True,
            rope=RopeDefaults(is_interleaved=True),
            experts=_CORRECTED,
            defaults={"norm_topk_prob": True},
        ),
        "MiMoV2FlashForCausalLM": Family(
            output_bias=False,
            window_rule=WindowRule.PATTERN,
            default_head_dim=192,
            rope=RopeDefaults(theta=5e6, partial=0.334),
            sliding_rope=RopeDefaults(theta_key="swa_rope_theta", partial=0.334),
            has_sinks=True,
            sinks_key="attention_sink_bias",
            is_hybrid=True,
            experts=_CORRECTED,
            defaults={"norm_topk_prob": True, "v_head_dim": 128},
        ),
        "Step3p5ForCausalLM": _STEP,
        "Step3p7ForConditionalGeneration": _STEP,
        "GptOssForCausalLM": Family(
            window_rule=WindowRule.PATTERN,
            window_period=2,
            default_head_dim=64,
            rope=RopeDefaults(theta=150_000.0),
            activation=Activation.CLAMPED_SWIGLU,
            has_sinks=True,
            experts=ExpertFamily(
                keys=ExpertKeys(router="router"),
                scores=RouterScores.SOFTMAX_OF_CHOSEN,
                normalises=False,
                is_stacked=True,
                has_biases=True,
            ),
            defaults=_EPS | {"attention_bias": True, "sliding_window": 128},
        ),
        "Olmo2ForCausalLM": _OLMO2,
        "Olmo3ForCausalLM": replace(
            _OLMO2,
            window_rule=WindowRule.PATTERN,
            window_period=4,
            sliding_rope=RopeDefaults(theta=500_000.0),
            rope=RopeDefaults(theta=500_000.0),
            defaults=_EPS | _WINDOW_4096,
        ),
    }
)
