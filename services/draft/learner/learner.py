"""Lessons: train on traffic, measure on held-out traffic, swap in better weights, roll back worse
ones. On a thread of its own."""

from __future__ import annotations

import json
import logging
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from services.draft.learner.student import LIKELY, Measurement, State, Student
from services.draft.learner.traffic import Example, Traffic
from shared.errors import OutriderError

LOG_FILE = "lessons.jsonl"
_POLL_S = 0.2
_MAX_HELD_OUT = 512
"""Held-out examples that are measured, the latest."""
_FRESH_SHARE = 0.5
"""Of what is not replayed, from what has come since the last lesson. Drawn evenly, the latest texts
of a long window would be seen least, and an old one again and again."""

log = logging.getLogger(__name__)

Publish = Callable[[Path, int], None]
"""Swaps the weights of a folder into every draft, under a version.

Raises: OutriderError if a draft refuses them or cannot be reached; some may have them then.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """The rules for training and for swapping weights.

    Attributes:
        out: folder of the versions, and of the log.
        num_updates: of a lesson.
        min_new_tokens: that must have come since the last lesson.
        num_steps: depth of the chains that acceptance is measured with.
        min_held_out: examples without which nothing is swapped or taken back.
        min_gain: tokens a round that new weights must gain to be swapped.
        max_loss: tokens a round that served weights may lose against those before them, on what
            came since the swap, before these are taken back.
        replay_share: of each batch, from the sample of all traffic.
        busy_share: of the time, spent on training and measuring.
        num_kept: versions whose folders are kept.
    """

    out: Path
    num_updates: int = 100
    min_new_tokens: int = 2000
    num_steps: int = 5
    min_held_out: int = 16
    min_gain: float = 0.02
    max_loss: float = 0.05
    replay_share: float = 0.25
    busy_share: float = 1.0
    num_kept: int = 4


@dataclass(frozen=True, slots=True)
class LessonReport:
    """The result of a lesson.

    Attributes:
        version: that serves after it; 0 is the head of the start.
        event: "kept", "swapped", "refused", "rolled back", or "outdated" where the target's weights
            changed meanwhile.
        loss: mean of its updates.
        before, after: tokens a round on held-out traffic, of the weights that served and of those
            that were tried; None where too little is held out.
    """

    num_lessons: int
    version: int
    event: str
    num_tokens: int
    loss: float
    before: float | None
    after: float | None


@dataclass(slots=True)
class LearnerFigures:
    """For metrics; filled by the learner's thread, read by any."""

    version: int = 0
    num_lessons: int = 0
    num_swaps: int = 0
    num_rollbacks: int = 0
    num_refused: int = 0
    loss: float = 0.0
    accepted_before: float = 0.0
    accepted_after: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Served:
    version: int
    state: State
    folder: Path


class Learner:
    """Owns the student and the versions."""

    def __init__(
        self,
        student: Student,
        traffic: Traffic,
        lessons: Lessons,
        publish: Publish,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.figures = LearnerFigures()
        self._student, self._traffic, self._lessons = student, traffic, lessons
        self._publish, self._clock = publish, clock
        self._random = random.Random(0)
        self._generator = torch.Generator().manual_seed(0)
        self._served = _Served(0, student.state(), student.folder)
        self._before: _Served | None = None
        self._swapped_s = self._taught_s = self._owed_s = 0.0
        self._num_watched = 0
        self._newest = max(map(_version_of, lessons.out.glob("version-*")), default=0)
        self._seen_tokens = 0
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def between_updates(self, function: Callable[[], None]) -> None:
        """Has the learner's thread call a function before its next update; from any thread."""
        self._calls.put(function)

    @property
    def version(self) -> int:
        """Version of the weights that serve; 0 is the one at the start."""
        return self._served.version

    @property
    def served_state(self) -> State:
        """The weights that serve."""
        return self._served.state

    def begin(self) -> None:
        """Has the drafts begin with the weights that the student begins with.

        Raises:
            OutriderError: as by `Publish`.
        """
        self._publish(self._served.folder, self._served.version)

    def run(self, stop: threading.Event, *, max_lessons: int | None = None) -> None:
        """Gives lessons as traffic comes, until `stop` is set or there were enough."""
        while not stop.is_set() and (max_lessons is None or self.figures.num_lessons < max_lessons):
            self._call()
            if self.watch() is None and self.step(stop) is None:
                stop.wait(_POLL_S)

    def watch(self) -> LessonReport | None:
        """Rolls back to the previous weights if those do better on the traffic since the swap."""
        before = self._before
        if before is None:
            return None
        since = self._traffic.held_out(since_s=self._swapped_s)[-_MAX_HELD_OUT:]
        if len(since) < self._num_watched + self._lessons.min_held_out:
            return None
        self._num_watched = len(since)
        served, old = self._measure(self._served.state, since), self._measure(before.state, since)
        if not old.beats(served, self._lessons.max_loss) or not self._send(before):
            return None
        self._served, self._before = before, None
        self._student.restore(before.state)
        self.figures.num_rollbacks += 1
        return self._note("rolled back", self.figures.loss, served, old)

    def step(self, stop: threading.Event | None = None) -> LessonReport | None:
        """Gives a lesson if there is enough to learn; returns what it brought."""
        lessons, traffic = self._lessons, self._traffic
        recent = traffic.recent()
        if not recent or traffic.num_tokens - self._seen_tokens < lessons.min_new_tokens:
            return None
        self._seen_tokens, num_forgotten = traffic.num_tokens, traffic.num_forgotten
        self.figures.num_lessons += 1
        loss = self._train(recent, traffic.replayed(), stop or threading.Event())
        if traffic.num_forgotten != num_forgotten:
            self._student.restore(self._served.state)
            return self._note("outdated", loss, None, None)
        held_out = traffic.held_out()[-_MAX_HELD_OUT:]
        if len(held_out) < lessons.min_held_out:
            return self._note("kept", loss, None, None)
        before = self._measure(self._served.state, held_out)
        after = self._measure(self._student.state(), held_out)
        # Most lessons bring something, and a swap by luck is rolled back: a stricter test would
        # keep worse weights for longer.
        if after.beats(before, lessons.min_gain, LIKELY):
            return self._swap(loss, before, after)
        if before.beats(after, lessons.max_loss):
            self._student.restore(self._served.state)
        return self._note("kept", loss, before, after)

    def _swap(self, loss: float, before: Measurement, after: Measurement) -> LessonReport:
        version = self._newest = self._newest + 1
        folder = self._lessons.out / f"version-{version}"
        self._student.save(folder)
        new = _Served(version, self._student.state(), folder)
        if not self._send(new):
            # Some drafts may have taken them: all go back to what served.
            self._send(self._served)
            self._student.restore(self._served.state)
            self.figures.num_refused += 1
            return self._note("refused", loss, before, after)
        self._before, self._served = self._served, new
        self._swapped_s, self._num_watched = self._clock(), 0
        self.figures.num_swaps += 1
        self._drop_old()
        return self._note("swapped", loss, before, after)

    def _train(
        self, recent: list[Example], replayed: list[Example], stop: threading.Event
    ) -> float:
        """Returns the mean loss; rests as often as the budget asks."""
        losses = []
        size, lessons = self._student.batch_size, self._lessons
        num_replayed = round(size * lessons.replay_share) if replayed else 0
        num_fresh = round((size - num_replayed) * _FRESH_SHARE)
        fresh = [each for each in recent if each.arrived_s >= self._taught_s] or recent
        self._taught_s = self._clock()
        for _ in range(self._lessons.num_updates):
            if stop.is_set():
                break
            self._call()
            start_s = time.perf_counter()
            batch = self._drawn(replayed, num_replayed) + self._drawn(fresh, num_fresh)
            batch += self._drawn(recent, size - len(batch))
            losses.append(self._student.learn(batch, self._generator))
            self._spend(time.perf_counter() - start_s)
            self._rest(stop)
        return sum(losses) / max(len(losses), 1)

    def _call(self) -> None:
        while not self._calls.empty():
            self._calls.get()()

    def _spend(self, busy_s: float) -> None:
        self.figures.busy_s += busy_s
        self._owed_s += busy_s / self._lessons.busy_share - busy_s

    def _rest(self, stop: threading.Event) -> None:
        """Waits for as long as the budget asks for what was spent."""
        if self._owed_s > 0.0:
            stop.wait(self._owed_s)
            self._owed_s = 0.0

    def _drawn(self, examples: list[Example], count: int) -> list[Example]:
        return self._random.choices(examples, k=count)

    def _measure(self, state: State, examples: list[Example]) -> Measurement:
        start_s = time.perf_counter()
        with self._student.as_it_was(state):
            found = self._student.measured(examples, num_steps=self._lessons.num_steps)
        self._spend(time.perf_counter() - start_s)
        return found

    def _send(self, served: _Served) -> bool:
        try:
            self._publish(served.folder, served.version)
        except OutriderError as error:
            log.error("version %d was not swapped in: %s", served.version, error.message)
            return False
        return True

    def _note(
        self, event: str, loss: float, before: Measurement | None, after: Measurement | None
    ) -> LessonReport:
        figures = self.figures
        own, other = (None if e is None else round(e.mean_length, 4) for e in (before, after))
        report = LessonReport(
            figures.num_lessons, self.version, event, self._traffic.num_tokens, loss, own, other
        )
        figures.version, figures.loss = self.version, loss
        figures.accepted_before, figures.accepted_after = own or 0.0, other or 0.0
        self._lessons.out.mkdir(parents=True, exist_ok=True)
        with (self._lessons.out / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time_s": round(time.time(), 1), **asdict(report)}) + "\n")
        shown = "" if own is None else f", {own:.3f} tokens a round before, {other:.3f} after"
        log.info("lesson %d: %s, loss %.3f%s", figures.num_lessons, event, loss, shown)
        return report

    def _drop_old(self) -> None:
        kept = {each.folder for each in (self._served, self._before) if each is not None}
        for folder in self._lessons.out.glob("version-*"):
            is_old = _version_of(folder) <= self._newest - self._lessons.num_kept
            if is_old and folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def _version_of(folder: Path) -> int:
    number = folder.name.removeprefix("version-")
    return int(number) if number.isdecimal() else 0
