"""The KV cache takes what the settings allow and refuses what cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.errors import SettingsError
from shared.kv.pool import KvLayout
from shared.runtime.memory import (
    CacheTooSmall,
    Shortage,
    available_bytes,
    container_free_bytes,
    free_memory_bytes,
    num_pages_for,
)

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, page_size=16, dtype=torch.float32)
CPU = torch.device("cpu")


def pages(
    *,
    free_pages: int,
    fraction: float | None = None,
    tokens: int | None = None,
    length: int = 64,
    reserved_pages: int = 0,
    most: int | None = None,
    token_bytes: int = 0,
    step_pages: int = 0,
) -> int:
    return num_pages_for(
        LAYOUT,
        CPU,
        mem_fraction_static=fraction,
        max_total_tokens=tokens,
        max_sequence_length=length,
        reserved_bytes=reserved_pages * LAYOUT.page_size_bytes,
        most_tokens=most,
        token_bytes_elsewhere=token_bytes,
        step_bytes=step_pages * LAYOUT.page_size_bytes,
        free_bytes=free_pages * LAYOUT.page_size_bytes,
    )


def test_page_size_counts_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.page_size_bytes == 2 * 2 * 1 * 8 * 16 * 4


def test_fraction_of_free_memory_is_taken_padding_page_included() -> None:
    assert pages(free_pages=100, fraction=0.5) == 50


def test_reserved_memory_is_left_alone() -> None:
    assert pages(free_pages=100, fraction=0.5, reserved_pages=40) == 30
    with pytest.raises(SettingsError):
        pages(free_pages=100, tokens=16 * 70, reserved_pages=40)


def test_a_share_that_nobody_named_leaves_room_for_a_step() -> None:
    """A quarter of a host; unless one sequence needs it all the same."""
    assert pages(free_pages=100, step_pages=70) == 25
    assert pages(free_pages=100, step_pages=80) == 20
    assert pages(free_pages=100, step_pages=99) == 4 + 1
    assert pages(free_pages=100, fraction=0.5, step_pages=80) == 50


def test_what_tokens_take_elsewhere_is_of_the_same_share() -> None:
    as_much_again = LAYOUT.token_size_bytes
    assert pages(free_pages=100, fraction=0.5, token_bytes=as_much_again) == 25
    assert pages(free_pages=100, tokens=16 * 40, token_bytes=as_much_again) == 40 + 1
    with pytest.raises(SettingsError, match="max-total-tokens is 960, which takes"):
        pages(free_pages=100, tokens=16 * 60, token_bytes=as_much_again)


def test_a_share_too_small_says_by_how_much() -> None:
    with pytest.raises(CacheTooSmall) as raised:
        pages(free_pages=8, fraction=0.5)
    size = LAYOUT.page_size_bytes
    assert raised.value.shortage == Shortage(10 * size, 8 * size)


def test_no_more_is_taken_than_is_of_use() -> None:
    assert pages(free_pages=100, fraction=0.5, most=16 * 20) == 20 + 1
    assert pages(free_pages=100, fraction=0.5, most=16 * 200) == 50
    assert pages(free_pages=100, fraction=0.5, most=16) == 4 + 1
    assert pages(free_pages=100, tokens=16 * 30, most=16 * 20) == 30 + 1


def test_host_cache_stops_at_a_useful_size() -> None:
    assert pages(free_pages=1_000_000) == 4 * 32 + 1


def test_max_total_tokens_decides_alone() -> None:
    assert pages(free_pages=1000, fraction=0.01, tokens=100) == 7 + 1


def test_too_small_a_fraction_names_the_setting_and_the_need() -> None:
    with pytest.raises(SettingsError, match=r"mem-fraction-static 0.01 .* 64 tokens"):
        pages(free_pages=100, fraction=0.01)


def test_too_few_total_tokens_names_the_setting_and_the_need() -> None:
    with pytest.raises(SettingsError, match=r"max-total-tokens is 32; .* takes 64"):
        pages(free_pages=100, tokens=32)


def test_more_total_tokens_than_memory_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"max-total-tokens is 16,000, which takes"):
        pages(free_pages=100, tokens=16_000)


def test_free_host_memory_is_measured() -> None:
    assert free_memory_bytes(CPU) > 0


def test_files_kept_in_memory_count_as_free(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemFree:   10 kB\nMemAvailable:  700 kB\n")
    assert available_bytes(meminfo) == 700 * 1024
    assert available_bytes(tmp_path / "absent") > 0


@pytest.mark.parametrize(
    ("limit", "free"), [("1000", 500), ("600", 100), ("200", 0), ("max", None)]
)
def test_a_container_leaves_its_limit_less_what_is_used(
    limit: str, free: int | None, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("800\n")
    (tmp_path / "memory.stat").write_text("anon 450\ninactive_file 300\nactive_file 50\n")
    assert container_free_bytes(tmp_path) == free
    assert container_free_bytes(tmp_path / "absent") is None
