"""The part of a decoder's tensors that one process of a group holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.layers.tensor_group import TensorGroup
from shared.models.checkpoint import Cut
from shared.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size` equal parts of a stage's layers; by default the whole model.

    Attributes:
        spreads_experts: a part has some experts whole, not a part of each expert.
        spreads_sequences: a part has all of attention, for sequences of its own.
        stage: index of the stage, from 0; see `layers`.
    """

    rank: int = 0
    size: int = 1
    spreads_experts: bool = False
    spreads_sequences: bool = False
    stage: int = 0
    num_stages: int = 1

    def problems(self, config: ModelConfig) -> tuple[str, ...]:
        """Returns one message for each size of the model that cannot be divided like this."""
        counts = {"intermediate_size": config.intermediate_size}
        if not self.spreads_sequences:
            counts = {"num_attention_heads": config.num_heads, **counts}
        if config.experts is None and self.spreads_experts:
            return (f"--ep-size is {self.size}; {config.architecture} has no experts",)
        if config.experts is not None and self.spreads_experts:
            counts["number of experts"] = config.experts.routing.num_experts
            counts["width of shared experts"] = config.experts.shared_size
        elif config.experts is not None:
            counts["moe_intermediate_size"] = config.experts.intermediate_size
        problems = [
            f"--tp-size is {self.size}; the model's {name}, {count}, is not a multiple of it"
            for name, count in counts.items()
            if count % self.size
        ]
        problems += self._stage_problems(config)
        if self.size > 1 and config.delta is not None:
            problems.append(
                f"--tp-size is {self.size}; {config.architecture} has linear attention, which "
                f"cannot be spread"
            )
        return (*problems, *self.of_attention._head_problems(config))

    def _head_problems(self, config: ModelConfig) -> list[str]:
        problems = []
        if config.num_kv_heads % self.size and self.size % config.num_kv_heads:
            problems.append(
                f"--tp-size is {self.size}; it must divide the model's num_key_value_heads, "
                f"{config.num_kv_heads}, or be a multiple of it"
            )
        if self.size > 1 and config.norms_all_heads:
            problems.append(
                f"--tp-size is {self.size}; {config.architecture} norms all heads at once, so that "
                f"they cannot be spread; --enable-dp-attention spreads sequences instead"
            )
        if self.size > 1 and (config.hybrid is not None or config.full_heads is not None):
            problems.append(
                f"--tp-size is {self.size}; {config.architecture} has two kinds of layers, whose "
                f"heads cannot be spread; --enable-dp-attention spreads sequences instead"
            )
        return problems

    @property
    def of_attention(self) -> Shard:
        """The part of the attention heads that this process holds."""
        return WHOLE if self.spreads_sequences else self

    def _stage_problems(self, config: ModelConfig) -> list[str]:
        problems = []
        if config.vocab_size % self.num_parts:
            flags = f"--tp-size is {self.size}"
            if self.num_stages > 1:
                flags += f" and --pp-size {self.num_stages}, together {self.num_parts}"
            problems.append(
                f"{flags}; the model's vocab_size, {config.vocab_size}, is not a multiple of it"
            )
        if self.num_stages > config.num_layers:
            problems.append(
                f"--pp-size is {self.num_stages}; the model has {config.num_layers} layers, and a "
                f"stage needs one"
            )
        if self.num_stages > 1 and config.delta is not None:
            problems.append(
                f"--pp-size is {self.num_stages}; {config.architecture} has linear attention, "
                f"which needs --pp-size 1"
            )
        return problems

    @property
    def num_parts(self) -> int:
        """Parts of embedding and lm_head, which all processes of all stages share."""
        return self.size * self.num_stages

    def layers(self, config: ModelConfig) -> range:
        """Returns the layers of the stage. If the number of layers is no multiple of the number of
        stages, the last stages have one layer more, since the first stage's device may host a
        draft."""
        count, rest = divmod(config.num_layers, self.num_stages)
        num_before = max(0, self.stage - (self.num_stages - rest))
        start = self.stage * count + num_before
        is_longer = self.stage >= self.num_stages - rest
        return range(start, start + count + is_longer)

    def cache_layers(self, config: ModelConfig) -> range:
        """Returns this process's layers of the model's cache."""
        layers = self.layers(config)
        return range(config.first_cache_layer(layers.start), config.first_cache_layer(layers.stop))

    def cache_layer(self, config: ModelConfig, layer: int) -> int:
        """Returns the index in this process's cache of a layer's first rows."""
        return config.first_cache_layer(layer) - self.cache_layers(config).start

    @property
    def of_experts(self) -> Shard:
        """The part of every expert that this process holds."""
        return WHOLE if self.spreads_experts else self

    def experts(self, num_experts: int) -> range:
        """Returns the experts that this process holds, whole or in part."""
        if not self.spreads_experts:
            return range(num_experts)
        count = num_experts // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def cut(self, dim: int, size: int) -> Cut | None:
        """Returns this part of the `size` rows or columns of a tensor along `dim`; None for all."""
        length = size // self.size
        return None if self.size == 1 else Cut(dim, self.rank * length, length)

    def num_heads(self, config: ModelConfig) -> int:
        return config.num_heads // self.size

    def layer_heads(self, config: ModelConfig, layer: int) -> int:
        return config.layer_heads(layer) // self.size

    def num_kv_heads(self, config: ModelConfig) -> int:
        """Key heads of this process; with more processes than key heads, neighbours hold the same
        one."""
        return max(1, config.num_kv_heads // self.size)

    def first_kv_head(self, config: ModelConfig) -> int:
        return self.rank * config.num_kv_heads // self.size

    def vocabulary(self, config: ModelConfig) -> range:
        """Returns the tokens whose rows of embedding and lm_head this process holds."""
        count, part = config.vocab_size // self.num_parts, self.stage * self.size + self.rank
        return range(part * count, (part + 1) * count)


WHOLE = Shard()


def shard_of(group: TensorGroup | None) -> Shard:
    """Returns the shard of this process in the group."""
    if group is None:
        return WHOLE
    layers, stage = group.of_layers, group.stage
    shard = WHOLE
    if layers is not None:
        shard = Shard(layers.rank, layers.size, layers.spreads_experts, layers.spreads_sequences)
    return shard if stage is None else replace(shard, stage=stage.index, num_stages=stage.count)
