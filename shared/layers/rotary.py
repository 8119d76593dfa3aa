"""Rotary frequencies of the scaling schemes that checkpoints name.

Dynamic NTK scaling depends on the length of the sequence. A paged cache holds keys that are
already rotated and shared between sequences, so here a row's frequencies depend on its own
position alone: below the original length they are the unscaled ones, and the row at position
t beyond it takes those of a sequence of t + 1 tokens. Other engines compute the same in
token-by-token generation with a cache. So a key is a function of the tokens before it, whatever
the chunking, the batch or the tree it was computed in. For a prompt longer than the original
length that they process at once, other engines take the frequencies of its full length for every
row; an incremental engine cannot know that length at the first chunk. LongRoPE has one set of
factors for short sequences and one for long ones, and is treated alike.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.pointwise import position_tables


class RopeScaling(enum.Enum):
    """The scaling of frequencies for positions beyond the original training length."""

    NONE = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary parameters of a checkpoint.

    Attributes:
        theta: base of the geometric series of wavelengths.
        factor: the extended length divided by the original length.
        original_length: positions before stretching.
        low_freq_factor: LLAMA3, wavelengths above `original_length / low_freq_factor` are
            stretched in full.
        high_freq_factor: LLAMA3, wavelengths below `original_length / high_freq_factor` are kept.
        beta_fast: YARN, dimensions with more turns over the original length are kept.
        beta_slow: YARN, dimensions with fewer turns are stretched in full.
        attention_factor: YARN and LONGROPE, scales cosine and sine; 1 elsewhere.
        truncate: YARN, whether the bounds are rounded to whole dimensions.
        short_factors: LONGROPE, divisors of the frequency of each pair at positions below the
            original length.
        long_factors: LONGROPE, likewise at the positions from there on.
        partial: the share of a head's dimensions that is rotated, from the first one.
        is_interleaved: in the checkpoint a rotation mixes neighbouring dimensions, not dimensions
            half a head apart.
    """

    theta: float
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    partial: float = 1.0
    is_interleaved: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """Returns how many dimensions of a head are rotated."""
        return int(head_dim * self.partial)

    def dim_order(self, head_dim: int) -> tuple[int, ...] | None:
        """Returns for each dimension of a head here its dimension in the checkpoint's query and key
        heads; None when the order is the same.

        Here a rotation mixes dimension i with i + D/2, and pairs that are not rotated have the
        frequency 0. A product of queries and keys does not depend on the order.
        """
        rotary_dim = self.rotary_dim(head_dim)
        if rotary_dim == head_dim and not self.is_interleaved:
            return None
        rotated, rest = range(rotary_dim), tuple(range(rotary_dim, head_dim))
        half, half_rest = rotary_dim // 2, len(rest) // 2
        first = rotated[::2] if self.is_interleaved else rotated[:half]
        second = rotated[1::2] if self.is_interleaved else rotated[half:]
        return (*first, *rest[:half_rest], *second, *rest[half_rest:])


class Rotary:
    """Rotation tables of any positions, for one head dimension on one device."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._config = config
        self._head_dim = head_dim
        rotary_dim = config.rotary_dim(head_dim)
        self._frequencies = inverse_frequencies(config, rotary_dim).to(device)
        self._exponents = _exponents(rotary_dim).to(device)
        # The unscaled frequencies, divided by the factors of long positions.
        long_factors = torch.tensor(config.long_factors or (1.0,))
        self._long_frequencies = config.theta ** -_exponents(rotary_dim) / long_factors
        self._long_frequencies = self._long_frequencies.to(device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosine and signed sine `[T, 1, head_dim]` float32 for `positions` `[T]`."""
        frequencies = self._frequencies
        if self._config.scaling is RopeScaling.DYNAMIC:
            frequencies = self._dynamic_frequencies(positions.unsqueeze(1))
        elif self._config.scaling is RopeScaling.LONGROPE:
            is_long = (positions >= self._config.original_length).unsqueeze(1)
            frequencies = torch.where(is_long, self._long_frequencies, frequencies)
        factor = self._config.attention_factor
        num_fixed = self._head_dim // 2 - frequencies.shape[-1]
        if num_fixed == 0:
            return position_tables(positions, frequencies, factor)
        cos, signed_sin = position_tables(positions, F.pad(frequencies, (0, num_fixed)), factor)
        if factor != 1.0:
            # Unrotated dimensions keep their length.
            cos.view(*cos.shape[:-1], 2, -1)[..., -num_fixed:] = 1.0
        return cos, signed_sin

    def _dynamic_frequencies(self, positions: Tensor) -> Tensor:
        """Returns `[T, head_dim / 2]`, the frequencies of a sequence that ends at each position.

        Source: "dynamic NTK" scaling, as in YaRN, arXiv 2309.00071, section 3.3.
        """
        config, dim = self._config, self._config.rotary_dim(self._head_dim)
        lengths = (positions + 1).clamp(min=config.original_length).float()
        growth = config.factor * lengths / config.original_length - (config.factor - 1.0)
        thetas = config.theta * growth ** (dim / (dim - 2))
        return thetas**-self._exponents


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Returns `[head_dim / 2]` float32, in radians per position: for DYNAMIC the unscaled
    frequencies, for LONGROPE those of short sequences."""
    plain = config.theta ** -_exponents(head_dim)
    if config.scaling is RopeScaling.LINEAR:
        return plain / config.factor
    if config.scaling is RopeScaling.LLAMA3:
        return _llama3(plain, config)
    if config.scaling is RopeScaling.YARN:
        return _yarn(plain, config, head_dim)
    if config.scaling is RopeScaling.LONGROPE:
        return plain / torch.tensor(config.short_factors)
    return plain


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _llama3(plain: Tensor, config: RopeConfig) -> Tensor:
    """Keeps short wavelengths, stretches long ones, and blends in between.

    Source: Llama 3.1 model card and reference code, `apply_scaling`.
    """
    turns = config.original_length * plain / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    keep = ((turns - config.low_freq_factor) / span).clamp(0.0, 1.0)
    return keep * plain + (1 - keep) * plain / config.factor


def _yarn(plain: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """Blends kept and stretched frequencies with a ramp over the dimensions.

    Source: Peng et al., arXiv 2309.00071, section 3.2, equations 17 to 23.
    """
    low = _dimension_of_turns(config.beta_fast, config, head_dim)
    high = _dimension_of_turns(config.beta_slow, config, head_dim)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return (1 - stretch) * plain + stretch * plain / config.factor


def _dimension_of_turns(turns: float, config: RopeConfig, head_dim: int) -> float:
    """Returns the (fractional) dimension with this many turns over the original length."""
    ratio = config.original_length / (turns * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(config.theta))
