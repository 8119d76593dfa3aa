"""Finds a checkpoint's next-token layers (MTP): their spelling and their numbers."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from dataclasses import dataclass


class MtpStyle(enum.Enum):
    """The spellings; MIMO's concatenates in the opposite order, see `MtpLayer`."""

    DEEPSEEK = "model.layers."
    MIMO = "model.mtp_layers."
    MIMO_V2 = "model.mtp.layers."


# In a DeepSeek-style folder the layers are numbered on from the decoder's own, so only the
# tensors that no decoder layer has tell them apart.
_KEYS = {
    MtpStyle.DEEPSEEK: re.compile(r"model\.layers\.(\d+)\.(?:eh_proj|enorm|hnorm|shared_head)\."),
    MtpStyle.MIMO: re.compile(r"model\.mtp_layers\.(\d+)\."),
    MtpStyle.MIMO_V2: re.compile(r"model\.mtp\.layers\.(\d+)\."),
}
# What else stands beside next-token layers.
MTP_PREFIXES = ("model.mtp.",)


@dataclass(frozen=True, slots=True)
class MtpLayers:
    """The next-token layers of one checkpoint.

    Attributes:
        style: None when there are none.
        prefixes: what the keys of each layer begin with, first layer first.
    """

    style: MtpStyle | None
    prefixes: tuple[str, ...]


def find_mtp_layers(keys: Collection[str]) -> MtpLayers:
    """Returns the next-token layers among the keys of a checkpoint."""
    for style, pattern in _KEYS.items():
        numbers = sorted({int(match[1]) for match in map(pattern.match, keys) if match})
        if numbers:
            return MtpLayers(style, tuple(f"{style.value}{number}." for number in numbers))
    return MtpLayers(None, ())
