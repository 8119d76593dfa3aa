"""Messages for a device without free memory: how much is missing, and which setting to lower."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shared.errors import SettingsError

# How torch writes sizes into the only thing that its error carries, a text.
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_WANTED = re.compile(f"allocate {_SIZE}")
_FREE = re.compile(f"of which {_SIZE} is free")
# Torch's allocator of GPU memory has an error of its own; that of the host, cuBLAS, and the driver,
# which loads kernels and makes graphs, say it in words.
_OTHER_WORDS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class Shortage:
    """The allocation that did not fit; None for sizes that are unknown.

    Attributes:
        wanted_bytes: of the one tensor that did not fit; more may be wanted behind it.
        free_bytes: that the device had left.
    """

    wanted_bytes: int | None = None
    free_bytes: int | None = None

    @classmethod
    def of(cls, error: RuntimeError) -> Shortage:
        """Reads the error's text.

        Raises:
            RuntimeError: the error itself, where it says nothing of memory.
        """
        if not is_shortage(error):
            raise error
        return cls(_bytes_at(_WANTED, str(error)), _bytes_at(_FREE, str(error)))

    @property
    def missing_bytes(self) -> int | None:
        """By how much it did not fit; all of it where memory is there, but in pieces."""
        if self.wanted_bytes is None:
            return None
        missing = self.wanted_bytes - (self.free_bytes or 0)
        return missing if missing > 0 else self.wanted_bytes

    def __str__(self) -> str:
        if self.wanted_bytes is None:
            return "no memory is left"
        free = "" if self.free_bytes is None else f", {in_words(self.free_bytes)} free"
        return f"{in_words(self.wanted_bytes)} more wanted{free}"


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The KV cache, which takes what others then lack, and the setting behind its size.

    Attributes:
        size_bytes: of keys and values.
        fraction: `--mem-fraction-static` in force; None where nobody said.
        max_total_tokens: the setting; where it is given, it decides alone.
    """

    size_bytes: int
    fraction: float | None = None
    max_total_tokens: int | None = None

    def advice(self, shortage: Shortage) -> str:
        """Returns what was missing, and which setting to lower to what."""
        return f"{shortage}; {self._setting(shortage.missing_bytes)}"

    def _setting(self, missing_bytes: int | None) -> str:
        if missing_bytes is None:
            flag = "mem-fraction-static" if self.max_total_tokens is None else "max-total-tokens"
            return f"lower --{flag}, of which the KV cache has {in_words(self.size_bytes)}"
        share = 1 - missing_bytes / self.size_bytes
        if self.max_total_tokens is None:
            most = math.floor((self.fraction or 1.0) * share * 100) / 100
        else:
            most = math.floor(self.max_total_tokens * share)
        if most <= 0:
            return (
                f"the whole KV cache takes {in_words(self.size_bytes)}: it wants a device with "
                f"more memory"
            )
        if self.max_total_tokens is not None:
            return f"lower --max-total-tokens from {self.max_total_tokens:,} to {most:,} or less"
        if self.fraction is None:
            return (
                f"the KV cache of {in_words(self.size_bytes)} has to take "
                f"{in_words(missing_bytes)} less: lower --mem-fraction-static"
            )
        return f"lower --mem-fraction-static from {self.fraction:g} to {most:g} or less"


def is_shortage(error: RuntimeError) -> bool:
    """Whether an error says that a device has no memory left, after which all else goes on."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in _OTHER_WORDS
    )


@contextmanager
def refusing_shortage(words: Callable[[Shortage], str]) -> Iterator[None]:
    """Makes of a lack of memory in its body a `SettingsError` with these words.

    Raises:
        SettingsError: memory ran out.
    """
    try:
        yield
    except RuntimeError as error:
        raise SettingsError((words(Shortage.of(error)),)) from error


def in_words(size_bytes: int) -> str:
    """Returns a size as an operator reads it."""
    unit = next((name for name in ("GiB", "MiB") if size_bytes >= _UNITS[name]), "KiB")
    return f"{size_bytes / _UNITS[unit]:,.2f} {unit}"


def _bytes_at(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])
