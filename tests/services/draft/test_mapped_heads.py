"""Targets whose rounds a draft's head takes part in; it declines what it could not compute, and
pushes trees then."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from services.draft.events import MappedCommandArrived, MappedHeadReady, Output
from services.draft.mapped_heads import MappedHeads
from shared.runtime.mapped_rounds import MappedRound, OpenMapped, PrepareMapped
from shared.runtime.ring_memory import RingAddress, RingUnavailable
from shared.runtime.round_state import RoundSampling

NOWHERE = OpenMapped(RingAddress(shared_file="0" * 32), None, (), 0)
LAST = PrepareMapped(0, 1, RoundSampling.GREEDY, is_last=True)
ROUND = MappedRound(0, 1, RoundSampling.GREEDY)
WORKER = "shared.runtime.mapped_head_worker.MappedHeadWorker"


class _Drafter:
    def share_head(self) -> Any:
        return SimpleNamespace(model=SimpleNamespace(id_limit=100), pages=tuple(range(1, 8)))


@dataclass
class _Worker:
    """Notes what it is asked for, and what comes between two rounds."""

    model: object
    command: OpenMapped
    stream: object
    events: list[object] = field(default_factory=list)

    def prepare(self, command: PrepareMapped) -> None:
        self.events.append(command)

    def warm_up(self) -> None:
        self.events.append("warm-up")

    def take(self, command: MappedRound) -> None:
        self.events.append(command)

    def abandon(self) -> None:
        self.events.append("abandoned")

    def hold_caller(self) -> None:
        self.events.append("hold")

    def wait_for_caller(self) -> None:
        self.events.append("wait")


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

    monkeypatch.setattr(WORKER, unavailable)
    outputs: list[Output] = []
    heads = MappedHeads(_Drafter(), outputs.append)
    heads.apply(MappedCommandArrived(7, NOWHERE), num_target_ids)
    assert outputs == [MappedHeadReady(7, ())]
    assert reason in caplog.text


def test_targets_have_pages_and_workers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[_Worker] = []

    def made(model: object, command: OpenMapped, stream: object, on_span: object) -> _Worker:
        workers.append(_Worker(model, command, stream or f"stream {len(workers)}"))
        return workers[-1]

    monkeypatch.setattr(WORKER, made)
    outputs: list[Output] = []
    heads = MappedHeads(_Drafter(), outputs.append, max_targets=2)

    def open_link(link: int) -> Output:
        heads.apply(MappedCommandArrived(link, NOWHERE), 100)
        heads.apply(MappedCommandArrived(link, LAST), 100)
        return outputs[-1]

    assert open_link(1) == MappedHeadReady(1, (1, 2, 3))
    assert open_link(2) == MappedHeadReady(2, (4, 5, 6))
    assert open_link(3) == MappedHeadReady(3, ())
    for link in (1, 2, 2, 3):
        heads.apply(MappedCommandArrived(link, ROUND), 100)
    assert [worker.events.count(ROUND) for worker in workers] == [1, 2]
    # Who comes next has the pages of the one that left, behind whatever that one queued.
    heads.close(1)
    assert workers[0].events[-1] == "abandoned"
    assert open_link(4) == MappedHeadReady(4, (1, 2, 3))
    assert [worker.stream for worker in workers] == ["stream 0", "stream 1", "stream 0"]
    with heads.between_rounds():
        workers[1].events.append("other weights")
    assert workers[1].events[-3:] == ["hold", "other weights", "wait"]
    with pytest.raises(ZeroDivisionError), heads.between_rounds():
        raise ZeroDivisionError
    assert workers[1].events[-2:] == ["hold", "wait"], "what was queued before comes first"
    assert workers[2].events[-2:] == ["hold", "wait"]
    assert "hold" not in workers[0].events
