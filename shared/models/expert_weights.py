"""The name map of a block of experts, and the block of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shared.kernels.experts import ExpertWeight
from shared.kernels.linear import can_be_batch_invariant
from shared.kernels.pointwise import Activation
from shared.layers.decoder_layer import Mlp
from shared.layers.experts import Experts, Router
from shared.layers.linear import STORED_DTYPES, Linear
from shared.layers.tensor_group import TensorGroup
from shared.model_options import Quantisation
from shared.models.checkpoint import Cut
from shared.models.expert_config import ExpertConfig
from shared.models.shard import Shard
from shared.models.weights import WeightPart


def expert_parts(
    config: ExpertConfig,
    hidden: int,
    source: str,
    target: str,
    shard: Shard,
    *,
    has_stacks: bool = False,
) -> Iterator[WeightPart]:
    """Yields the tensors of one block of experts, see `decoder_weights.layer_parts`.

    A shard holds some channels of every expert, or some experts.

    Args:
        has_stacks: the checkpoint has those of a layer as one tensor, where the family allows it.
    """
    keys, wide = config.family.keys, config.intermediate_size
    layer, source = source, f"{source}{keys.block}"
    router, num_experts = f"{source}{keys.router}", config.routing.num_experts
    yield WeightPart(f"{router}.weight", (num_experts, hidden), f"{target}router.weight")
    if config.family.has_correction:
        yield WeightPart(
            f"{source}{keys.correction}",
            (num_experts,),
            f"{target}router.correction",
            dtype=torch.float32,
        )
    if config.family.is_stacked_apart:
        yield from _parts_stacked_apart(config, hidden, source, target, shard)
    if config.family.is_stacked:
        yield from _stacked_parts(config, hidden, f"{source}experts.", target, shard)
    if config.family.has_biases:
        yield WeightPart(f"{router}.bias", (num_experts,), f"{target}router.bias")
    is_whole = config.family.may_be_stacked and has_stacks
    if is_whole:
        yield from _whole_parts(config, hidden, f"{source}experts.", target, shard)
    inner, outer = _cuts(wide, shard.of_experts)
    family = config.family
    is_one_tensor = family.is_stacked or family.is_stacked_apart or is_whole
    for expert in () if is_one_tensor else shard.experts(num_experts):
        own = f"{source}experts.{expert}."
        for key in (keys.gate, keys.up):
            yield WeightPart(
                f"{own}{key}.weight", (wide, hidden), f"{target}experts.gate_up", cut=inner
            )
        yield WeightPart(
            f"{own}{keys.down}.weight", (hidden, wide), f"{target}experts.down", cut=outer
        )
    if config.shared_size:
        place = layer if keys.has_shared_apart else source
        yield from _shared_parts(config, hidden, place, target, shard)
        if keys.shared_gate is not None:
            yield WeightPart(
                f"{place}{keys.shared_gate}.weight", (1, hidden), f"{target}shared.gate.weight"
            )


def _parts_stacked_apart(
    config: ExpertConfig, hidden: int, source: str, target: str, shard: Shard
) -> Iterator[WeightPart]:
    keys, wide, num_experts = (
        config.family.keys,
        config.intermediate_size,
        config.routing.num_experts,
    )
    inner, outer = _cuts(wide, shard.of_experts)
    matrices = (
        (f"{keys.gate}.weight", (wide, hidden), "gate_up", inner),
        (f"{keys.up}.weight", (wide, hidden), "gate_up", inner),
        (f"{keys.down}.weight", (hidden, wide), "down", outer),
    )
    return _of_stacks(matrices, num_experts, source, target, shard)


def _whole_parts(
    config: ExpertConfig, hidden: int, source: str, target: str, shard: Shard
) -> Iterator[WeightPart]:
    wide, num_experts = config.intermediate_size, config.routing.num_experts
    part = shard.of_experts
    own, outer = wide // part.size, _cuts(wide, part)[1]
    first = part.rank * own
    matrices = (
        ("gate_up_proj", (2 * wide, hidden), "gate_up", Cut(0, first, own)),
        ("gate_up_proj", (2 * wide, hidden), "gate_up", Cut(0, wide + first, own)),
        ("down_proj", (hidden, wide), "down", outer),
    )
    return _of_stacks(matrices, num_experts, source, target, shard)


def _of_stacks(
    matrices: Sequence[tuple[str, tuple[int, int], str, Cut | None]],
    num_experts: int,
    source: str,
    target: str,
    shard: Shard,
) -> Iterator[WeightPart]:
    """Yields the part of each expert in tensors that hold the matrices of all.

    Args:
        matrices: key, shape of one expert's, name and cut.
    """
    for expert in shard.experts(num_experts):
        for key, shape, name, cut in matrices:
            yield WeightPart(
                f"{source}{key}",
                (num_experts, *shape),
                f"{target}experts.{name}",
                cut=cut,
                index=expert,
                keeps_order=True,
            )


def _stacked_parts(
    config: ExpertConfig, hidden: int, source: str, target: str, shard: Shard
) -> Iterator[WeightPart]:
    wide, num_experts = config.intermediate_size, config.routing.num_experts
    part = shard.of_experts
    own, outer = wide // part.size, _cuts(wide, part)[1]
    first, both = part.rank * own, (hidden, 2 * wide)
    matrices: list[tuple[str, tuple[int, ...], str, Cut | None, tuple[int, ...] | None]]
    if config.family.has_biases:
        # Gate and up of a channel are neighbours.
        inner = Cut(0, 2 * first, 2 * own)
        order = (*range(0, 2 * own, 2), *range(1, 2 * own, 2))
        matrices = [
            ("gate_up_proj", both, "gate_up", inner, order),
            ("gate_up_proj_bias", both[1:], "gate_up_bias", inner, order),
            ("down_proj_bias", (hidden,), "down_bias", None, None),
        ]
    else:
        matrices = [
            ("gate_up_proj", both, "gate_up", Cut(0, start, own), None)
            for start in (first, wide + first)
        ]
    matrices.append(("down_proj", (wide, hidden), "down", outer, None))
    for expert in shard.experts(num_experts):
        for key, shape, name, cut, row_order in matrices:
            yield WeightPart(
                f"{source}{key}",
                (num_experts, *shape),
                f"{target}experts.{name}",
                cut=cut,
                row_order=row_order,
                index=expert,
            )


def _shared_parts(
    config: ExpertConfig, hidden: int, source: str, target: str, shard: Shard
) -> Iterator[WeightPart]:
    keys, wide = config.family.keys, config.shared_size
    inner, outer = _cuts(wide, shard)
    source, target = f"{source}{keys.shared}", f"{target}shared."
    for key in ("gate_proj", "up_proj"):
        yield WeightPart(
            f"{source}{key}.weight", (wide, hidden), f"{target}gate_up.weight", cut=inner
        )
    yield WeightPart(f"{source}down_proj.weight", (hidden, wide), f"{target}down.weight", cut=outer)


def build_experts(
    config: ExpertConfig,
    tensors: dict[str, Tensor],
    prefix: str,
    activation: Activation,
    quantisation: Quantisation,
    group: TensorGroup | None,
    limit: float | None = None,
    shared_limit: float | None = None,
) -> Experts:
    """Takes the tensors of one block out of the dict.

    Args:
        limit, shared_limit: see `Mlp`.
    """
    num_experts, stored = config.routing.num_experts, STORED_DTYPES.get(quantisation)
    is_spread = group is not None and group.spreads_experts
    if is_spread:
        assert group is not None
        num_experts //= group.size

    def stacked(name: str) -> ExpertWeight:
        weight = tensors.pop(f"{prefix}experts.{name}")
        bias = tensors.pop(f"{prefix}experts.{name}_bias", None)
        if bias is not None:
            bias = bias.view(num_experts, -1)
            # What a group's processes compute is added up, and the bias counts once.
            if name == "down" and group is not None and group.rank > 0 and not is_spread:
                bias = torch.zeros_like(bias)
        return ExpertWeight.of(weight.view(num_experts, -1, weight.shape[1]), bias, stored)

    shared = None
    if config.shared_size:
        shared = Mlp(
            Linear.of(tensors.pop(f"{prefix}shared.gate_up.weight"), None, quantisation),
            # Its sum over processes is that of the whole block.
            replace(
                Linear.of(tensors.pop(f"{prefix}shared.down.weight"), None, quantisation, group),
                group=None,
            ),
            activation,
            shared_limit,
        )
    shared_gate = tensors.pop(f"{prefix}shared.gate.weight", None)
    router = tensors.pop(f"{prefix}router.weight")
    is_wide = config.family.is_wide
    if is_wide and not can_be_batch_invariant(router):
        router = router.float()
    return Experts(
        router=Router(
            weight=Linear.of(router, tensors.pop(f"{prefix}router.bias", None)),
            correction=tensors.pop(f"{prefix}router.correction", None),
            routing=config.routing,
            is_wide=is_wide,
        ),
        gate_up=stacked("gate_up"),
        down=stacked("down"),
        activation=activation,
        shared=shared,
        group=group,
        scales_inputs=config.family.scales_inputs,
        limit=limit,
        shared_gate=None if shared_gate is None else Linear.of(shared_gate),
    )


def _cuts(wide: int, shard: Shard) -> tuple[Cut | None, Cut | None]:
    """Returns the parts of matrices with `wide` outputs, and with `wide` inputs."""
    if shard.size == 1:
        return None, None
    own = wide // shard.size
    return Cut(0, shard.rank * own, own), Cut(1, shard.rank * own, own)
