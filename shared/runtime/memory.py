"""Device memory: how many KV pages fit beside the weights, and advice when memory runs out."""

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

# How torch writes sizes into the text of its error, which carries nothing else.
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_WANTED = re.compile(f"allocate {_SIZE}")
_FREE = re.compile(f"of which {_SIZE} is free")
# Torch's GPU allocator has an error class of its own. The host allocator, cuBLAS and the driver,
# which loads kernels and instantiates graphs, report a shortage only in the text of an error.
_SHORTAGE_TEXTS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class Shortage:
    """An allocation that did not fit; None for unknown sizes.

    Attributes:
        wanted_bytes: size of the one tensor that did not fit; later tensors may need more.
        free_bytes: free memory of the device.
    """

    wanted_bytes: int | None = None
    free_bytes: int | None = None

    @classmethod
    def of(cls, error: RuntimeError) -> Shortage:
        """Parses the text of an out-of-memory error.

        Raises:
            RuntimeError: the error itself, if it is of another kind.
        """
        if not is_shortage(error):
            raise error
        return cls(_bytes_at(_WANTED, str(error)), _bytes_at(_FREE, str(error)))

    @property
    def missing_bytes(self) -> int | None:
        """Bytes that were missing; the whole allocation if memory was free but fragmented."""
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
    """The size of the KV cache, which takes most memory, and the settings behind it.

    Attributes:
        size_bytes: size of keys and values.
        fraction: the value of `--mem-fraction-static` that gives this size; None if unknown.
        max_total_tokens: the setting; if set, it alone decides the size.
    """

    size_bytes: int
    fraction: float | None = None
    max_total_tokens: int | None = None

    def advice(self, shortage: Shortage) -> str:
        """Returns a message that names the missing memory, and the setting to lower."""
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
        return f"lower --mem-fraction-static from {self.fraction:.3g} to {most:g} or less"


def is_shortage(error: RuntimeError) -> bool:
    """Whether an error means that a device is out of memory, after which other work can go on."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error) for text in _SHORTAGE_TEXTS
    )


@contextmanager
def refusing_shortage(words: Callable[[Shortage], str]) -> Iterator[None]:
    """Turns an out-of-memory error of the body into a `SettingsError` with these words.

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
    match = pattern.search(text)
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


# Default shares of the memory that is free once the weights are loaded. A GPU serves only us but
# needs room for activations; a host is shared with other processes.
_CUDA_FRACTION = 0.85
_CPU_FRACTION = 0.25
# Cap on a host, in full-length sequences: a larger cache would take memory without use.
_CPU_MAX_FULL_SEQUENCES = 32
_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class CacheTooSmall(SettingsError):
    """The share of memory that a cache may take does not hold one sequence.

    Attributes:
        shortage: what the device would need for that share, and what it has free.
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
            None chooses a default for the kind of device.
        max_total_tokens: tokens the cache shall hold; None takes what the share allows.
        max_sequence_length: longest sequence that will be served, in tokens.
        reserved_bytes: memory that CUDA graphs will take, of the memory now free.
        step_bytes: memory of the largest step beside that. A default share leaves it free, as long
            as the cache still holds one sequence.
        token_bytes_elsewhere: bytes that each token of the cache takes elsewhere, beside its keys
            and values, of the same share.
        most_tokens: most tokens of use to the cache, which still holds the longest sequence.
            Ignored if `max_total_tokens` is given.
        free_bytes: memory now free; None asks the device.

    Raises:
        SettingsError: the cache would not fit.
        CacheTooSmall: the cache would not hold one sequence of full length. Both name the setting
            to change.
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
        num_pages = _num_pages(max_total_tokens, layout) + 1
        problem, size = f"max-total-tokens is {max_total_tokens:,}", num_pages * page_bytes
        if num_pages <= needed:
            problem += f"; one sequence of the context length takes {max_sequence_length:,}"
        elif size > free:
            problem += f", which takes {_gib(size)}; {_gib(free)} are free"
        else:
            return num_pages
        raise SettingsError((problem,))
    if affordable < needed:
        size = (needed + 1) * page_bytes
        raise CacheTooSmall(
            f"mem-fraction-static {fraction:g} of {_gib(free)} free is "
            f"{_gib(int(free * fraction))}; one sequence of the context length, "
            f"{max_sequence_length:,} tokens, takes {_gib(size)}: raise mem-fraction-static or "
            f"lower context-length",
            Shortage(int(size / fraction), free),
        )
    if device.type == "cpu":
        affordable = min(affordable, needed * _CPU_MAX_FULL_SEQUENCES)
    if most_tokens is not None:
        affordable = min(affordable, max(_num_pages(most_tokens, layout), needed))
    return affordable + 1


def free_memory_bytes(device: torch.device) -> int:
    """Returns bytes free on a CUDA device, or available to this process on the host."""
    if device.type == "cuda":
        # The allocator keeps what loading freed, such as quantised weights' originals, until then.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = available_bytes()
    limit = container_free_bytes()
    return available if limit is None else min(available, limit)


def available_bytes(meminfo: Path = _MEMORY) -> int:
    """Returns the memory that processes of this host can still get. The page cache, such as weights
    that were just read, gives way to them and counts as free."""
    try:
        return 1024 * int(_fields(meminfo)["MemAvailable:"])
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_free_bytes(folder: Path = _CGROUP) -> int | None:
    """Returns the memory that the container's limit leaves; None without a limit. Cached files that
    were not used lately count as free."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        files = int(_fields(folder / "memory.stat")["inactive_file"])
    except (OSError, KeyError):
        return None
    return max(0, int(limit) - used + files) if limit.isdigit() else None


def _fields(path: Path) -> dict[str, str]:
    """Returns the second word of each line of a file, by the first word."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}


def fraction_in_force(mem_fraction_static: float | None, device: torch.device) -> float:
    """Returns the share of free memory that a cache may take."""
    if mem_fraction_static is not None:
        return mem_fraction_static
    return _CPU_FRACTION if device.type == "cpu" else _CUDA_FRACTION


def _num_pages(num_tokens: int, layout: KvLayout) -> int:
    return -(-num_tokens // layout.page_size)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
