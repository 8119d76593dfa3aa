"""The stack of processes behind `make serve`, with stand-ins for the services."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.stack import Child, ChildSpec, Part, Stack, StackTimeouts

QUICK = StackTimeouts(start_s=60.0, stop_s=30.0, first_backoff_s=0.01, first_word_s=60.0)


class Scene:
    """A stack of stand-ins with what they wrote and what the stack reported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.journal_file = folder / "journal"
        self.journal_file.touch()
        self.reports: list[str] = []
        self.parts: list[Part] = []
        self.stop = asyncio.Event()
        self.at_once = asyncio.Event()

    def add(self, name: str, *flags: str, is_expendable: bool = False) -> Child:
        spec = ChildSpec(
            name,
            "tests.helpers.stand_in",
            (name, str(self.journal_file), *flags),
            self._folder / f"{name}.log",
        )
        child = Child(spec)
        self.parts.append(Part(child, self._has_started(name), is_expendable=is_expendable))
        return child

    def _has_started(self, name: str) -> Callable[[], Awaitable[bool]]:
        async def has_started() -> bool:
            return f"{name} started" in self.journal

        return has_started

    @property
    def journal(self) -> list[str]:
        return self.journal_file.read_text().splitlines()

    async def run(self, announce: Callable[[], None], timeouts: StackTimeouts = QUICK) -> int:
        stack = Stack(self.parts, timeouts, self.reports.append)
        return await stack.run(self.stop, announce, self.at_once)


def _kill(child: Child) -> None:
    process_id = child.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)


async def test_parts_stop_in_reverse_order(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for name in ("target", "draft", "gateway"):
        scene.add(name)
    assert await scene.run(scene.stop.set) == 0
    assert scene.journal[3:] == ["gateway stopped", "draft stopped", "target stopped"]
    assert scene.reports == []


async def test_a_part_that_fails_at_start_ends_the_stack_with_its_last_words(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)
    target = scene.add("target")
    scene.add("draft", "--fail", is_expendable=True)
    announced: list[bool] = []
    assert await scene.run(lambda: announced.append(True)) == 1
    assert announced == []
    assert "draft ended with exit code 3" in scene.reports[0]
    assert "no weights found" in scene.reports[0]
    assert not target.is_running


async def test_a_dead_draft_is_started_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.add("target")
    draft = scene.add("draft", is_expendable=True)
    run = asyncio.create_task(scene.run(lambda: _kill(draft)))
    while scene.journal.count("draft started") < 2:
        assert not run.done(), scene.reports
        await asyncio.sleep(0.01)
    scene.stop.set()
    assert await run == 0
    assert "draft ended with exit code -9" in scene.reports[0]


async def test_a_draft_that_returns_is_announced(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    draft = scene.add("draft", is_expendable=True)

    async def has_started_twice() -> bool:
        return scene.journal.count("draft started") == 2

    [part] = scene.parts
    scene.parts = [dataclasses.replace(part, is_back=has_started_twice)]
    run = asyncio.create_task(scene.run(lambda: _kill(draft)))
    while scene.reports[1:] != ["draft is back"]:
        assert not run.done(), scene.reports
        await asyncio.sleep(0.01)
    scene.stop.set()
    assert await run == 0


@pytest.mark.parametrize(
    ("exit_code", "last"), [(3, "take another draft"), (1, "no weights found")]
)
async def test_a_part_whose_models_do_not_fit_comes_with_what_to_do(
    exit_code: int, last: str, tmp_path: Path
) -> None:
    scene = Scene(tmp_path)
    scene.add("draft", f"--fail={exit_code}", is_expendable=True)
    [part] = scene.parts
    scene.parts = [dataclasses.replace(part, hint="take another draft")]
    assert await scene.run(lambda: None) == 1
    assert scene.reports[0].endswith(last)


async def test_a_start_that_goes_on_says_what_it_waits_for(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def is_told() -> bool:
        return bool(scene.reports)

    scene.parts = [Part(scene.add("target"), is_told)]
    assert await scene.run(scene.stop.set, StackTimeouts(first_word_s=0.1)) == 0
    [waiting] = scene.reports
    assert re.fullmatch(r"waiting for target since \d+ s: .*target\.log", waiting)


async def test_a_dead_target_ends_the_stack(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    target = scene.add("target")
    gateway = scene.add("gateway")
    assert await scene.run(lambda: _kill(target)) == 1
    assert "target ended with exit code -9" in scene.reports[0]
    assert scene.journal[-1] == "gateway stopped"
    assert not gateway.is_running


async def test_a_part_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    for stop_s in (0.2, 2.0, 20.0):  # in which a busy machine may not even let it ignore anything
        folder = tmp_path / str(stop_s)
        folder.mkdir()
        scene = Scene(folder)
        target = scene.add("target", "--stubborn")
        assert await scene.run(scene.stop.set, StackTimeouts(stop_s=stop_s)) == 0
        assert not target.is_running
        assert "was killed" in scene.reports[-1]
        if scene.journal[-1] == "target ignored SIGTERM":
            return
    pytest.fail("it was killed before it was told to end")


async def test_parts_that_must_stop_at_once_are_killed_together(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    target, gateway = scene.add("target"), scene.add("gateway", "--stubborn")
    run = asyncio.create_task(scene.run(scene.stop.set))
    while "gateway ignored SIGTERM" not in scene.journal:
        assert not run.done(), scene.reports
        await asyncio.sleep(0.01)
    assert target.is_running, "it stops after the gateway"
    scene.at_once.set()
    assert await run == 0
    assert not target.is_running
    assert not gateway.is_running
    assert scene.reports == []


async def test_a_part_that_never_gets_ready_is_named(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    scene = Scene(tmp_path)
    child = scene.add("target")
    scene.parts = [Part(child, never)]
    assert await scene.run(scene.stop.set, StackTimeouts(start_s=0.3)) == 1
    assert scene.reports[0].startswith("target is not ready after 0.3 s")


async def test_a_stop_during_start_stops_what_was_started(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    target = scene.add("target")
    scene.stop.set()
    assert await scene.run(lambda: None) == 0
    assert not target.is_running
