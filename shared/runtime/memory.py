"""Computes the number of KV pages that fit on a device beside the weights."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shared.errors import SettingsError
from shared.kv.layout import KvLayout
from shared.runtime.shortage import Shortage

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
    affordable = int(free * fraction) // page_bytes - 1
    needed = _num_pages(max_sequence_length, layout)
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
