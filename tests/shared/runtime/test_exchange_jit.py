"""What the device waits for in a round with a head of another process; in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from shared.kernels.kernel_settings import IS_INTERPRETING

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not IS_INTERPRETING, reason="waits for two GPUs otherwise"),
]
ROUND, FOREVER_US = 7, 1_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """What the other side, and the host, have written before the round.

    Attributes:
        failed: the last round that the head could not draft in.
        late: the last round that was late.
        forgiven: the last late round that does not count.
    """

    done: int = ROUND
    failed: int = 0
    late: int = 0
    gone: int = 0
    forgiven: int = 0
    limit_us: int = FOREVER_US


@pytest.fixture(autouse=True)
def _standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes: a wait that nothing but its limit ended would not end."""
    import triton
    import triton.language as tl

    from shared.runtime import exchange_jit

    @triton.jit
    def now_ns():  # type: ignore[no-untyped-def]
        return tl.full((), 0, tl.int64)

    monkeypatch.setattr(exchange_jit, "_now_ns", now_ns)


@pytest.mark.parametrize(
    ("case", "is_late"),
    [
        (Case(), False),
        (Case(failed=ROUND - 1), False),
        (Case(late=3, forgiven=3), False),
        (Case(failed=ROUND), True),
        (Case(done=ROUND - 1, limit_us=0), True),
        (Case(done=ROUND - 1, gone=1), True),
        (Case(done=ROUND - 1, late=ROUND - 1, forgiven=3), True),
    ],
    ids=str,
)
def test_a_round_waits_for_a_head_that_may_answer(case: Case, *, is_late: bool) -> None:
    from shared.runtime.exchange_jit import exchange

    go = torch.zeros(1, dtype=torch.int32)
    counters = torch.tensor([case.done, case.failed], dtype=torch.int32)
    notes = torch.tensor([case.late, case.gone], dtype=torch.int32)
    exchange[(1,)](go, counters, notes, case.forgiven, ROUND, case.limit_us)
    assert go.item() == ROUND
    assert notes.tolist() == [ROUND if is_late else case.late, case.gone]


@pytest.mark.parametrize(("go", "gone"), [(ROUND, 0), (ROUND - 1, 1)])
def test_a_head_waits_for_a_target_that_has_not_gone(go: int, gone: int) -> None:
    from shared.runtime.exchange_jit import await_go

    told = torch.tensor([go, gone], dtype=torch.int32)
    current = torch.zeros(1, dtype=torch.int32)
    await_go[(1,)](told, told[1:], current, ROUND, FOREVER_US)
    assert current.item() == ROUND
