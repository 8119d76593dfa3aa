"""Memory of a device: how many KV pages fit beside the weights, and messages where too few do."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.errors import SettingsError
from shared.kv.pool import KvLayout

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


# Shares of the memory that is free once the weights are loaded, when the operator names none. A
# GPU is ours alone but needs room for activations; a host is shared with everything else.
_CUDA_FRACTION = 0.85
_CPU_FRACTION = 0.25
# On a host more than this many full-length sequences would be memory taken for nothing.
_CPU_MAX_FULL_SEQUENCES = 32
_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class CacheTooSmall(SettingsError):
    """The share of memory that a cache may take does not hold one sequence.

    Attributes:
        shortage: of the memory that the share is of.
    """

    def __init__(self, problem: str, shortage: Shortage) -> None:
        super().__init__((problem,))
        self.shortage = shortage


def num_pages_for(
    layout: KvLayout,
    device: torch.device,
    *,
    mem_fraction_static: float | None,
    max_total_tokens: int | None,
    max_sequence_length: int,
    reserved_bytes: int = 0,
    step_bytes: int = 0,
    token_bytes_elsewhere: int = 0,
    most_tokens: int | None = None,
    free_bytes: int | None = None,
) -> int:
    """Returns the number of pages to allocate, the padding page included.

    Call it once the weights are loaded.

    Args:
        mem_fraction_static: share, in (0, 1], of the memory now free that the cache may take;
            None chooses one for the kind of device.
        max_total_tokens: tokens the cache shall hold; None takes what the share allows.
        max_sequence_length: longest sequence that will be served, in tokens.
        reserved_bytes: of the memory now free, what CUDA graphs will take.
        step_bytes: that the largest step takes beside them. A share that nobody named leaves as
            much, where the cache still holds one sequence.
        token_bytes_elsewhere: what each token of the cache takes beside its keys and values, of
            the same share.
        most_tokens: beyond these more would be memory taken for nothing; counts where
            `max_total_tokens` is None, and leaves room for the longest sequence.
        free_bytes: memory now free; None asks the device.

    Raises:
        SettingsError: if the cache would not fit.
        CacheTooSmall: if it would not hold one sequence of full length. Both name the setting to
            change.
    """
    free = free_memory_bytes(device) if free_bytes is None else free_bytes
    free = max(0, free - reserved_bytes)
    fraction = fraction_in_force(mem_fraction_static, device)
    page_bytes = layout.page_size_bytes + layout.page_size * token_bytes_elsewhere
    needed = _num_pages(max_sequence_length, layout)
    affordable = int(free * fraction) // page_bytes - 1
    if mem_fraction_static is None:
        beside = (free - step_bytes) // page_bytes - 1
        affordable = min(affordable, max(beside, needed))
    if max_total_tokens is not None:
        wanted = _num_pages(max_total_tokens, layout)
        _check_explicit(wanted, needed, free, page_bytes, max_total_tokens, max_sequence_length)
        return wanted + 1
    if affordable < needed:
        size = (needed + 1) * page_bytes
        raise _too_small(size, free, fraction, max_sequence_length)
    if device.type == "cpu":
        affordable = min(affordable, needed * _CPU_MAX_FULL_SEQUENCES)
    if most_tokens is not None:
        affordable = min(affordable, max(_num_pages(most_tokens, layout), needed))
    return affordable + 1


def free_memory_bytes(device: torch.device) -> int:
    """Returns bytes free on a CUDA device, or available to this process on the host."""
    if device.type == "cuda":
        # What loading freed, as quantised weights' originals, is the allocator's until told.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = available_bytes()
    limit = container_free_bytes()
    return available if limit is None else min(available, limit)


def available_bytes(meminfo: Path = _MEMORY) -> int:
    """Returns what processes of this host can still get. Files that the kernel keeps in memory,
    such as weights that were just read, give way to them and count as free."""
    try:
        return 1024 * int(_figures(meminfo)["MemAvailable:"])
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_free_bytes(folder: Path = _CGROUP) -> int | None:
    """Returns what the container's limit leaves, or None without a limit. Files that were not
    used lately count as free."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        files = int(_figures(folder / "memory.stat")["inactive_file"])
    except (OSError, KeyError):
        return None
    return max(0, int(limit) - used + files) if limit.isdigit() else None


def _figures(path: Path) -> dict[str, str]:
    """Returns the second word of each line by the first."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}


def fraction_in_force(mem_fraction_static: float | None, device: torch.device) -> float:
    """Returns the share of free memory that a cache may take."""
    if mem_fraction_static is not None:
        return mem_fraction_static
    return _CPU_FRACTION if device.type == "cpu" else _CUDA_FRACTION


def _num_pages(num_tokens: int, layout: KvLayout) -> int:
    return -(-num_tokens // layout.page_size)


def _check_explicit(
    wanted: int,
    needed: int,
    free: int,
    page_bytes: int,
    max_total_tokens: int,
    max_sequence_length: int,
) -> None:
    if wanted < needed:
        raise SettingsError(
            (
                f"max-total-tokens is {max_total_tokens:,}; one sequence of the context length "
                f"takes {max_sequence_length:,}",
            )
        )
    size = (wanted + 1) * page_bytes
    if size > free:
        raise SettingsError(
            (
                f"max-total-tokens is {max_total_tokens:,}, which takes {_gib(size)}; "
                f"{_gib(free)} are free",
            )
        )


def _too_small(size: int, free: int, fraction: float, max_sequence_length: int) -> CacheTooSmall:
    return CacheTooSmall(
        f"mem-fraction-static {fraction:g} of {_gib(free)} free is {_gib(int(free * fraction))}; "
        f"one sequence of the context length, {max_sequence_length:,} tokens, takes {_gib(size)}: "
        f"raise mem-fraction-static or lower context-length",
        Shortage(int(size / fraction), free),
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
