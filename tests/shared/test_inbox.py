"""What asks for work is bounded; what ends work always arrives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.errors import EngineFailed, QueueFull, Unavailable
from shared.inbox import Inbox


def test_commands_run_in_the_order_they_were_posted() -> None:
    inbox, ran = Inbox(8), []
    for number in range(3):
        inbox.post(lambda number=number: ran.append(number))
    inbox.post_end(lambda: ran.append(3))
    assert inbox.call(lambda: len(ran)).done() is False
    inbox.run_all()
    assert ran == [0, 1, 2, 3]


def test_full_inbox_refuses_work_and_takes_its_end() -> None:
    inbox, ran = Inbox(2), []
    for number in range(2):
        inbox.post(lambda number=number: ran.append(number))
    with pytest.raises(QueueFull, match="the queue holds 2"):
        inbox.post(lambda: ran.append(9))
    inbox.post_end(lambda: ran.append(2))
    inbox.run_all()
    assert ran == [0, 1, 2]


def test_calls_and_commands_leave_each_other_room() -> None:
    inbox, ran = Inbox(2), []
    for number in range(2):
        inbox.post(lambda number=number: ran.append(number))
    calls = [inbox.call(lambda: list(ran)) for _ in range(2)]
    for ask in (inbox.post, inbox.call):
        with pytest.raises(QueueFull, match="the queue holds 2"):
            ask(lambda: None)
    inbox.run_all()
    assert [each.result(timeout=0) for each in calls] == [[0, 1], [0, 1]]
    inbox.call(lambda: None)
    inbox.post(lambda: None)


def test_what_a_call_raises_reaches_its_caller() -> None:
    inbox = Inbox(2)

    def fail() -> None:
        raise KeyError("x")

    future = inbox.call(fail)
    inbox.run_all()
    with pytest.raises(KeyError):
        future.result(timeout=0)


def test_a_waiting_engine_is_woken_by_a_command() -> None:
    inbox, ran = Inbox(2), []
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(inbox.run_all, wait_s=None)
        inbox.post(lambda: ran.append(1))
        waiting.result()
    assert ran == [1]


def test_closed_inbox_refuses_work_and_still_runs_what_came_before() -> None:
    inbox, ran = Inbox(2), []
    inbox.post(lambda: ran.append(1))
    inbox.close(Unavailable.draining)
    inbox.close(EngineFailed.of)
    for ask in (inbox.post, inbox.call):
        with pytest.raises(Unavailable):
            ask(lambda: ran.append(9))
    inbox.post_end(lambda: ran.append(2))
    inbox.run_all()
    assert ran == [1, 2]
