"""Makes a model wider and deeper without changing what it computes.

A benchmark needs a target of a real size whose drafts are right as often as trained drafts are, so
random weights will not do. Copying the parts of a small trained model does:

- Every channel of the residual stream stands there r times. A matrix that writes the stream has
  its rows repeated; one that reads it has its columns repeated, each with a share of the weight.
  The mean square of repeated channels is that of the channels, so norms, with the same epsilon,
  return the same numbers.
- Attention heads stand there several times with the columns of the output projection shared among
  the copies, in groups of the wide model's size. Their width stays, because rotary frequencies
  depend on it, and so do the frequencies themselves.
- Channels of the feed-forward block are copied and shared likewise, some once more than others
  where the sizes do not divide.
- Further layers are copies whose output projections are zero: they cost what a layer costs and add
  nothing to the stream.
- Further tokens have the rows of one token that the model never writes.

Shares are powers of two that add up to one, so that no weight is rounded in any element type. The
wide model differs from the small one only in the order of its sums. That is not true of drawing at
a temperature: the further tokens take a part of the probability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class CannotWiden(ValueError):
    """The small sizes do not fit into the wide ones; the message names both."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Which small position each wide one copies.

    Attributes:
        index: `[wide]` int64.
        shares: `[wide]` float32 that add up to 1 over the copies of a position; None where
            copies are whole.
    """

    index: Tensor
    shares: Tensor | None = None

    @classmethod
    def of(cls, sources: Sequence[int]) -> Axis:
        """Whole copies of `sources`."""
        return cls(torch.tensor(sources, dtype=torch.int64))

    def shared(self) -> Axis:
        """Returns the axis of a matrix that adds up what the copies hold."""
        sources = self.index.tolist()
        left = {source: shares_of(count) for source, count in Counter(sources).items()}
        return Axis(self.index, torch.tensor([left[source].pop() for source in sources]))

    def expanded(self, size: int) -> Axis:
        """Returns the axis whose positions are `size` neighbours each, as channels of heads."""
        index = (self.index.unsqueeze(1) * size + torch.arange(size)).flatten()
        shares = None if self.shares is None else self.shares.repeat_interleave(size)
        return Axis(index, shares)

    def repeated(self, num_blocks: int, block_size: int) -> Axis:
        """Returns the axis of several blocks of `block_size` small positions, end to end."""
        starts = torch.arange(num_blocks).unsqueeze(1) * block_size
        shares = None if self.shares is None else self.shares.repeat(num_blocks)
        return Axis((starts + self.index).flatten(), shares)


def shares_of(count: int) -> list[float]:
    """Returns `count` powers of two that add up to 1."""
    larger = 1 << (count.bit_length() - 1)
    num_halves = 2 * (count - larger)
    return [1.0 / larger] * (count - num_halves) + [0.5 / larger] * num_halves


def copies(small: int, wide: int, what: str) -> Axis:
    """Returns whole copies one after another; the first positions may have one more.

    Raises:
        CannotWiden: `wide` is less than `small`.
    """
    if wide < small:
        raise CannotWiden(f"{what} is {small}; {wide} is no widening of it")
    return Axis.of([position % small for position in range(wide)])


def whole_copies(small: int, wide: int, what: str) -> Axis:
    """Returns copies of which every position has equally many.

    Raises:
        CannotWiden: `wide` is not a multiple of `small`.
    """
    if wide % small:
        raise CannotWiden(f"{what} is {small}; {wide} is not a multiple of it")
    return copies(small, wide, what)


def head_copies(small: tuple[int, int], wide: tuple[int, int]) -> tuple[Axis, Axis]:
    """Returns the axes of query heads and of key heads; both arguments are their numbers.

    Every query head meets copies of its own key head. Where groups do not divide, the first query
    heads of a group have a copy more than the others.

    Raises:
        CannotWiden: that cannot be.
    """
    (heads, kv_heads), (wide_heads, wide_kv_heads) = small, wide
    group, wide_group = heads // kv_heads, wide_heads // wide_kv_heads
    # A wide group holds all query heads of a small one, some several times, or a part of them.
    parts = max(1, group // wide_group)
    if wide_group < group and group % wide_group:
        raise CannotWiden(f"groups of {group} query heads do not fit into groups of {wide_group}")
    size = group // parts
    keys = whole_copies(kv_heads * parts, wide_kv_heads, "num_key_value_heads in parts").index
    queries = [
        int(key) * size + place * size // wide_group for key in keys for place in range(wide_group)
    ]
    return Axis.of(queries), Axis(keys // parts)


def tokens(small: int, wide: int, spare_token: int) -> Axis:
    """Returns the tokens themselves, then copies of `spare_token`.

    Raises:
        CannotWiden: there are fewer than before, or no such token.
    """
    if wide < small or not 0 <= spare_token < small:
        raise CannotWiden(
            f"vocab_size is {small}; {wide} is no widening of it with token {spare_token} to copy"
        )
    return Axis.of([*range(small), *[spare_token] * (wide - small)])


def widened(tensor: Tensor, axes: Sequence[Axis | None]) -> Tensor:
    """Returns `tensor` with each of its axes copied, in its own element type; None leaves one."""
    for dim, axis in enumerate(axes):
        if axis is None:
            continue
        tensor = tensor.index_select(dim, axis.index.to(tensor.device))
        if axis.shares is not None:
            shape = [-1 if each == dim else 1 for each in range(tensor.dim())]
            tensor = tensor * axis.shares.to(tensor.device, tensor.dtype).view(shape)
    return tensor
