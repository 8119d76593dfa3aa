"""Who has no memory left hears how much is missing, and what to lower to what."""

from __future__ import annotations

import pytest
import torch

from shared.errors import SettingsError
from shared.runtime.memory import CacheSize, Shortage, in_words, is_shortage, refusing_shortage

GIB = 2**30
TEXT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB of "
    "which 512.00 MiB is free. Including non-PyTorch memory, this process has 139.30 GiB memory "
    "in use."
)
SHORTAGE = Shortage(5 * GIB // 2, GIB // 2)


def test_torch_says_what_was_missing() -> None:
    assert Shortage.of(torch.OutOfMemoryError(TEXT)) == SHORTAGE
    assert Shortage.of(torch.OutOfMemoryError("no room")) == Shortage()
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(2**47, dtype=torch.uint8)  # more than a process can address
    assert Shortage.of(raised.value) == Shortage(2**47)
    assert is_shortage(raised.value)
    assert SHORTAGE.missing_bytes == 2 * GIB
    assert str(SHORTAGE) == "2.50 GiB more wanted, 512.00 MiB free"
    assert str(Shortage()) == "no memory is left"


def test_another_error_goes_on_as_it_is() -> None:
    error = RuntimeError("shapes do not fit")
    with pytest.raises(RuntimeError) as raised:
        Shortage.of(error)
    assert raised.value is error


def test_memory_in_pieces_is_missing_as_a_whole() -> None:
    assert Shortage(GIB, 3 * GIB).missing_bytes == GIB
    assert Shortage(GIB).missing_bytes == GIB


@pytest.mark.parametrize(
    ("cache", "advice"),
    [
        (CacheSize(100 * GIB, 0.85), "lower --mem-fraction-static from 0.85 to 0.83 or less"),
        (CacheSize(1000 * GIB, 0.85), "lower --mem-fraction-static from 0.85 to 0.84 or less"),
        (
            CacheSize(100 * GIB, 0.85, 1_000_000),
            "lower --max-total-tokens from 1,000,000 to 980,000 or less",
        ),
        (
            CacheSize(100 * GIB, 0.01, 1_000_000),
            "lower --max-total-tokens from 1,000,000 to 980,000 or less",
        ),
        (
            CacheSize(2 * GIB, 0.85, 1_000_000),
            "the whole KV cache takes 2.00 GiB: it wants a device with more memory",
        ),
        (
            CacheSize(100 * GIB),
            "the KV cache of 100.00 GiB has to take 2.00 GiB less: lower --mem-fraction-static",
        ),
        (
            CacheSize(GIB, 0.85),
            "the whole KV cache takes 1.00 GiB: it wants a device with more memory",
        ),
    ],
)
def test_advice_names_the_setting_and_its_value(cache: CacheSize, advice: str) -> None:
    assert cache.advice(SHORTAGE) == f"2.50 GiB more wanted, 512.00 MiB free; {advice}"


def test_advice_without_an_amount_names_the_setting() -> None:
    for cache, flag in ((CacheSize(GIB, 0.5), "mem-fraction-static"), (
        CacheSize(GIB, 0.5, 64), "max-total-tokens"
    )):  # fmt: skip
        assert f"lower --{flag}, of which the KV cache has 1.00 GiB" in cache.advice(Shortage())


def test_a_shortage_is_refused_in_the_words_of_who_knows() -> None:
    with (
        pytest.raises(SettingsError, match=r"the model: 2.50 GiB more wanted") as raised,
        refusing_shortage(lambda shortage: f"the model: {shortage}"),
    ):
        raise torch.OutOfMemoryError(TEXT)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_driver_and_libraries_run_out_in_words_of_their_own(
    error: RuntimeError, expected: bool
) -> None:
    assert is_shortage(error) is expected
    with (
        pytest.raises(SettingsError if expected else RuntimeError) as raised,
        refusing_shortage(str),
    ):
        raise error
    assert expected or raised.value is error


def test_sizes_in_words() -> None:
    sizes = [512, 3 * 2**19, 2000 * GIB]
    assert [in_words(each) for each in sizes] == ["0.50 KiB", "1.50 MiB", "2,000.00 GiB"]
