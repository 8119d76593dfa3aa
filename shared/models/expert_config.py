"""The experts of a decoder, read from its config."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import CheckpointError
from shared.kernels.pointwise import SWIGLU_ALPHA, SWIGLU_LIMIT
from shared.kernels.routing import RouterScores, Routing
from shared.models.config_file import ConfigFile

_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
# Routing over groups is DeepSeek-V2's choice between two; all others have one way.
_GROUPLESS = "greedy"


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """Names of the parts of a block of experts in a family's checkpoints.

    Attributes:
        block: what all keys begin with, after those of the layer.
        router: the router's matrix.
        gate: of an expert, and so are up and down.
        shared: what the keys of the block that all rows take begin with.
        correction: of the choice.
        has_shared_apart: the shared block stands beside the block, not in it.
        shared_gate: the gate of the shared block; None where it has none.
    """

    block: str = "mlp."
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts."
    correction: str = "gate.e_score_correction_bias"
    has_shared_apart: bool = False
    shared_gate: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertFamily:
    """Properties in which the experts of model families differ.

    Attributes:
        scores: function of the router's logits.
        normalises: whether the weights of the chosen are divided by their sum; None asks the
            config.
        has_correction: the choice, and not the weights, has a bias an expert.
        is_wide: the router computes in float32.
        is_stacked: the checkpoint has all experts' matrices as one tensor, transposed.
        may_be_stacked: it has so in some checkpoints, but not transposed.
        is_stacked_apart: it has those of gate, up and down as one tensor each.
        has_biases: experts and router have biases, and gate and up of a stack are interleaved.
        scales_inputs: see `Experts`.
    """

    keys: ExpertKeys
    scores: RouterScores
    normalises: bool | None = None
    has_correction: bool = False
    is_wide: bool = False
    is_stacked: bool = False
    may_be_stacked: bool = False
    is_stacked_apart: bool = False
    has_biases: bool = False
    scales_inputs: bool = False


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Sizes and switches of a decoder's experts.

    Attributes:
        family: where they depart from other families'.
        layers: those whose feed-forward block has experts.
        intermediate_size: of an expert.
        shared_size: of the block that all rows take; 0 where there is none.
    """

    family: ExpertFamily
    routing: Routing
    layers: frozenset[int]
    intermediate_size: int
    shared_size: int


def read_experts(config: ConfigFile, family: ExpertFamily | None) -> ExpertConfig | None:
    """Returns the experts of a model; None where the family has none.

    Raises:
        CheckpointError: for a missing or mistyped key, or counts that do not fit.
    """
    if family is None:
        return None
    _check_activation(config)
    width = config.integer("moe_intermediate_size", config.integer("intermediate_size"))
    return ExpertConfig(
        family=family,
        routing=_routing(config, family),
        layers=_layers(config),
        intermediate_size=width,
        shared_size=config.integer(
            "share_expert_dim", width * config.integer("n_shared_experts", 0)
        ),
    )


def _check_activation(config: ConfigFile) -> None:
    for key, needed in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        value = config.number(key, needed)
        if value != needed:
            raise CheckpointError(f"{config.path}: {key} is {value:g}; it must be {needed:g}")


def _routing(config: ConfigFile, family: ExpertFamily) -> Routing:
    num_experts = next(
        (config.integer(key) for key in _COUNT_KEYS if key in config), None
    ) or config.integer(_COUNT_KEYS[0])
    num_chosen = config.integer("num_experts_per_tok")
    num_groups = config.integer("n_group", 1)
    if config.text("topk_method", "") == _GROUPLESS:
        num_groups = 1
    num_chosen_groups = config.integer("topk_group", 1) if num_groups > 1 else 1
    most = num_experts // num_groups * num_chosen_groups
    if num_experts % num_groups or not 1 <= num_chosen <= most:
        raise CheckpointError(
            f"{config.path}: num_experts_per_tok is {num_chosen} of {num_experts} experts in "
            f"{num_groups} groups, of which {num_chosen_groups} stay; it must be in [1, {most}], "
            f"and groups of equal size"
        )
    normalises = family.normalises
    return Routing(
        num_experts=num_experts,
        num_chosen=num_chosen,
        scores=family.scores,
        normalises=config.flag("norm_topk_prob", False) if normalises is None else normalises,
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
    )


def _layers(config: ConfigFile) -> frozenset[int]:
    """Returns the layers with experts: configs list them, or count them in one of several ways."""
    if config.integers("moe_layers"):
        return frozenset(config.integers("moe_layers"))
    kinds, num_layers = config.texts("mlp_layer_types"), config.integer("num_hidden_layers")
    if kinds:
        return frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")
    listed = config.integers("moe_layer_freq")
    if len(listed) > 1:
        return frozenset(index for index, has_experts in enumerate(listed) if has_experts)
    first = config.integer("first_k_dense_replace", 0)
    step = config.integer("interleave_moe_layer_step", config.integer("decoder_sparse_step", 1))
    frequency = listed[0] if listed else 1
    dense = config.integers("mlp_only_layers")
    return frozenset(
        layer
        for layer in range(first, num_layers)
        if layer not in dense and (layer + 1) % step == 0 and layer % frequency == 0
    )
