"""The part of a decoder's tensors that one process of a tensor group holds."""

from __future__ import annotations

from dataclasses import dataclass

from shared.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size` equal parts; the whole unless told otherwise.

    Attributes:
        spreads_experts: a part has some experts whole, not a part of each.
        spreads_sequences: a part has all of attention, for sequences of its own.
    """

    rank: int = 0
    size: int = 1
    spreads_experts: bool = False
    spreads_sequences: bool = False

    def problems(self, config: ModelConfig) -> tuple[str, ...]:
        """Returns a line for each size of the model that cannot be cut so."""
        counts = {
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
        }
        if not self.spreads_sequences:
            counts = {"num_attention_heads": config.num_heads, **counts}
        if config.experts is None and self.spreads_experts:
            return (f"--ep-size is {self.size}; {config.architecture} has no experts",)
        if config.experts is not None and self.spreads_experts:
            counts["number of experts"] = config.experts.routing.num_experts
            counts["width of shared experts"] = config.experts.shared_size
        elif config.experts is not None:
            counts["moe_intermediate_size"] = config.experts.intermediate_size
        found = [
            f"--tp-size is {self.size}; the model's {name}, {count}, is not a multiple of it"
            for name, count in counts.items()
            if count % self.size
        ]
        if self.size > 1 and config.delta is not None:
            found.append(
                f"--tp-size is {self.size}; {config.architecture} has linear attention, which "
                f"cannot be spread"
            )
        return (*found, *self.of_attention._head_problems(config))

    def _head_problems(self, config: ModelConfig) -> list[str]:
        found = []
        if config.num_kv_heads % self.size and self.size % config.num_kv_heads:
            found.append(
                f"--tp-size is {self.size}; it must divide the model's num_key_value_heads, "
                f"{config.num_kv_heads}, or be a multiple of it"
            )
        if self.size > 1 and config.norms_all_heads:
            found.append(
                f"--tp-size is {self.size}; {config.architecture} norms all heads at once, so that "
                f"they cannot be spread; --enable-dp-attention spreads sequences instead"
            )
        if self.size > 1 and (config.hybrid is not None or config.full_heads is not None):
            found.append(
                f"--tp-size is {self.size}; {config.architecture} has two kinds of layers, whose "
                f"heads cannot be spread; --enable-dp-attention spreads sequences instead"
            )
        return found

    @property
    def of_attention(self) -> Shard:
        """The part of the heads that this process holds."""
        return WHOLE if self.spreads_sequences else self

    @property
    def of_experts(self) -> Shard:
        """The part of every expert that this process holds."""
        return WHOLE if self.spreads_experts else self

    def experts(self, num_experts: int) -> range:
        """Returns the experts of which something is here."""
        if not self.spreads_experts:
            return range(num_experts)
        count = num_experts // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def num_heads(self, config: ModelConfig) -> int:
        return config.num_heads // self.size

    def layer_heads(self, config: ModelConfig, layer: int) -> int:
        return config.layer_heads(layer) // self.size

    def num_kv_heads(self, config: ModelConfig) -> int:
        """With more processes than key heads, neighbours hold the same one."""
        return max(1, config.num_kv_heads // self.size)

    def first_kv_head(self, config: ModelConfig) -> int:
        return self.rank * config.num_kv_heads // self.size

    def vocabulary(self, config: ModelConfig) -> range:
        """Returns the tokens whose rows of embedding and lm_head are here."""
        count = config.vocab_size // self.size
        return range(self.rank * count, (self.rank + 1) * count)


WHOLE = Shard()
