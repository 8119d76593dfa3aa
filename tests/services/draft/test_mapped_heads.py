"""A draft declines rounds that it could not compute; its trees are pushed then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.draft.events import MappedCommandArrived, MappedHeadReady, Output
from services.draft.mapped_heads import MappedHeads
from shared.runtime.mapped_rounds import OpenMapped
from shared.runtime.ring_memory import RingAddress, RingUnavailable

NOWHERE = OpenMapped(RingAddress(shared_file="0" * 32), None, (), 0)


class _Drafter:
    def share_head(self) -> Any:
        return SimpleNamespace(model=SimpleNamespace(id_limit=100), pages=(1, 2))


@pytest.mark.parametrize(
    ("num_target_ids", "reason"),
    [(101, "it has 100 token ids, its target 101"), (100, "no such memory")],
)
def test_a_target_with_more_token_ids_than_the_head_gets_none(
    num_target_ids: int,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unavailable(*_: object) -> None:
        raise RingUnavailable("no such memory")

    monkeypatch.setattr("shared.runtime.mapped_head_worker.MappedHeadWorker", unavailable)
    outputs: list[Output] = []
    heads = MappedHeads(_Drafter(), outputs.append)
    heads.take(MappedCommandArrived(7, NOWHERE), num_target_ids)
    assert outputs == [MappedHeadReady(7, ())]
    assert reason in caplog.text
