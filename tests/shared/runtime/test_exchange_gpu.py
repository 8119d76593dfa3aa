"""The target's side of rounds with a head in another process, on a GPU."""

from __future__ import annotations

import pytest
import torch

LIMIT_US = 20_000


@pytest.mark.gpu
def test_rounds_behind_a_late_one_wait_for_nothing() -> None:
    from shared.runtime.exchange_jit import exchange

    go, done, _failed = torch.zeros(3, dtype=torch.int32, device="cuda")
    notes = torch.zeros(2, dtype=torch.int32, pin_memory=True)
    late = notes[0]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(6)]  # type: ignore[no-untyped-call]

    def queue(number: int, forgiven: int) -> None:
        exchange[(1,)](
            *(go.data_ptr(), done.data_ptr(), notes.data_ptr(), forgiven, number, LIMIT_US),
            num_warps=1,
        )
        marks[number].record()

    done.fill_(1)
    queue(1, 0)
    torch.cuda.synchronize()
    assert int(late) == 0, "it was there"
    marks[1].record()
    for number in (2, 3):
        queue(number, 0)
    torch.cuda.synchronize()
    assert int(late) == int(go) == 3
    assert marks[1].elapsed_time(marks[2]) > 0.9 * LIMIT_US / 1e3
    assert marks[2].elapsed_time(marks[3]) < 0.2 * LIMIT_US / 1e3
    queue(4, 3)
    torch.cuda.synchronize()
    assert marks[3].elapsed_time(marks[4]) > 0.9 * LIMIT_US / 1e3, "forgiven, so it counts again"
    done.fill_(5)
    queue(5, 4)
    torch.cuda.synchronize()
    assert int(late) == 4, "it was there"


@pytest.mark.gpu
def test_an_address_may_have_any_value() -> None:
    """Compiles for addresses below 2 GiB, at which memory of the host may be; runs nothing."""
    from shared.runtime.exchange_jit import await_go, exchange, gather_words, raise_done

    low, here = 1 << 20, torch.zeros(1, dtype=torch.int32, device="cuda")
    exchange.warmup(low, low, low, 0, 1, LIMIT_US, grid=(1,), num_warps=1)
    await_go.warmup(low, low, here, 1, LIMIT_US, grid=(1,), num_warps=1)
    raise_done.warmup(low, here, grid=(1,), num_warps=1)
    rows = here.long()
    gather_words.warmup(low, rows, rows, NUM_WORDS=1, BLOCK=32, grid=(1, 1))
