"""The learner's loop of lessons: train on traffic, measure on held-out traffic, swap in better
weights, roll back worse ones. Runs on its own thread."""

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

from services.draft.learner.settings import LearnerSettings
from services.draft.learner.student import LIKELY, Measurement, State, Student
from services.draft.learner.traffic import Example, Traffic
from services.draft.metrics import counter, gauge
from shared.errors import OutriderError

LOG_FILE = "lessons.jsonl"
_POLL_S = 0.2
_MAX_HELD_OUT = 512
"""Most held-out examples of a measurement; the latest are taken."""
MIN_HELD_OUT = 16
"""Examples without which weights are neither swapped in nor rolled back."""
NUM_STEPS = 5
"""Depth of the chains with which acceptance is measured."""
_FRESH_SHARE = 0.5
"""Share of examples since the last lesson in a batch, replayed examples not counted. Drawn evenly,
the latest texts of a long window would be seen least, and old ones again and again."""

log = logging.getLogger(__name__)

Publish = Callable[[Path, int], None]
"""Swaps the weights of a folder into every draft, as the given version.

Raises: OutriderError if a draft refuses them or cannot be reached; other drafts may have them then.
"""


@dataclass(frozen=True, slots=True)
class LessonReport:
    """The result of a lesson.

    Attributes:
        version: of the weights that serve after the lesson; 0 is the initial head.
        event: "kept", "swapped", "refused", "rolled back", or "outdated" if the target's weights
            changed meanwhile.
        loss: mean of the updates.
        before, after: tokens per round on held-out traffic, of the served and of the tried weights;
            None if too little traffic is held out.
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
    """Figures for metrics; written by the learner's thread, read by any."""

    version: int = gauge("version", "Version of the weights that serve; 0 is the initial one")
    loss: float = gauge("loss", "Mean loss of the last lesson")
    accepted_before: float = gauge("accepted_before", "Tokens a round of the served weights")
    accepted_after: float = gauge("accepted_after", "Tokens a round of those that were tried")
    num_lessons: int = counter("lessons", "Lessons given")
    num_swaps: int = counter("swaps", "Weights swapped into drafts")
    num_rollbacks: int = counter("rollbacks", "Weights taken back")
    num_refused: int = counter("refusals", "Weights that a draft refused")
    busy_s: float = counter("busy_seconds", "Time of training")


@dataclass(frozen=True, slots=True, eq=False)
class _Version:
    version: int
    state: State
    folder: Path


class Learner:
    """Trains the student and manages the versions of its weights."""

    def __init__(
        self,
        student: Student,
        traffic: Traffic,
        settings: LearnerSettings,
        publish: Publish,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.figures = LearnerFigures()
        self._student, self._traffic, self._settings = student, traffic, settings
        self._publish, self._clock = publish, clock
        self._random = random.Random(0)
        self._generator = torch.Generator().manual_seed(0)
        self._served = _Version(0, student.state(), student.folder)
        self._previous: _Version | None = None
        self._swap_s = self._last_lesson_s = self._rest_s = 0.0
        self._num_compared = 0
        self._latest_version = max(map(_version_of, settings.out.glob("version-*")), default=0)
        self._num_tokens_used = 0
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def between_updates(self, function: Callable[[], None]) -> None:
        """Lets the learner's thread call a function before its next update. Any thread may call."""
        self._calls.put(function)

    @property
    def version(self) -> int:
        """Version of the served weights; 0 is the initial one."""
        return self._served.version

    @property
    def served_state(self) -> State:
        return self._served.state

    def begin(self) -> None:
        """Swaps the student's initial weights into the drafts.

        Raises:
            OutriderError: see `Publish`.
        """
        self._publish(self._served.folder, self._served.version)

    def run(self, stop: threading.Event, *, max_lessons: int | None = None) -> None:
        """Gives lessons as traffic arrives, until `stop` is set or `max_lessons` are done."""
        while not stop.is_set() and (max_lessons is None or self.figures.num_lessons < max_lessons):
            self._call()
            if self.watch() is None and self.step(stop) is None:
                stop.wait(_POLL_S)

    def watch(self) -> LessonReport | None:
        """Rolls back to the previous weights if they are better on the traffic since the swap."""
        previous = self._previous
        if previous is None:
            return None
        examples = self._traffic.held_out(since_s=self._swap_s)[-_MAX_HELD_OUT:]
        if len(examples) < self._num_compared + MIN_HELD_OUT:
            return None
        self._num_compared = len(examples)
        served = self._measure(self._served.state, examples)
        old = self._measure(previous.state, examples)
        if not old.beats(served, self._settings.max_loss) or not self._send(previous):
            return None
        self._served, self._previous = previous, None
        self._student.restore(previous.state)
        self.figures.num_rollbacks += 1
        return self._report("rolled back", self.figures.loss, served, old)

    def step(self, stop: threading.Event | None = None) -> LessonReport | None:
        """Gives a lesson if there is enough new traffic; returns its result."""
        settings, traffic = self._settings, self._traffic
        recent = traffic.recent()
        # Without targets no new tokens arrive: lessons repeat the recorded traffic.
        min_new_tokens = settings.lesson_tokens if settings.target else 0
        if not recent or traffic.num_tokens - self._num_tokens_used < min_new_tokens:
            return None
        self._num_tokens_used, num_forgotten = traffic.num_tokens, traffic.num_forgotten
        self.figures.num_lessons += 1
        loss = self._train(recent, traffic.replayed(), stop or threading.Event())
        if traffic.num_forgotten != num_forgotten:
            self._student.restore(self._served.state)
            return self._report("outdated", loss, None, None)
        held_out = traffic.held_out()[-_MAX_HELD_OUT:]
        if len(held_out) < MIN_HELD_OUT:
            return self._report("kept", loss, None, None)
        before = self._measure(self._served.state, held_out)
        after = self._measure(self._student.state(), held_out)
        # The test is weak: most lessons improve the weights, and a swap by luck is rolled back. A
        # stricter test would keep worse weights for longer.
        if after.beats(before, settings.min_gain, LIKELY):
            return self._swap(loss, before, after)
        if before.beats(after, settings.max_loss):
            self._student.restore(self._served.state)
        return self._report("kept", loss, before, after)

    def _swap(self, loss: float, before: Measurement, after: Measurement) -> LessonReport:
        version = self._latest_version = self._latest_version + 1
        folder = self._settings.out / f"version-{version}"
        self._student.save(folder)
        new = _Version(version, self._student.state(), folder)
        if not self._send(new):
            # Some drafts may have the new weights: all return to the served ones.
            self._send(self._served)
            self._student.restore(self._served.state)
            self.figures.num_refused += 1
            return self._report("refused", loss, before, after)
        self._previous, self._served = self._served, new
        self._swap_s, self._num_compared = self._clock(), 0
        self.figures.num_swaps += 1
        self._drop_old()
        return self._report("swapped", loss, before, after)

    def _train(
        self, recent: list[Example], replayed: list[Example], stop: threading.Event
    ) -> float:
        """Makes the updates of a lesson, with the pauses of `busy_share`; returns the mean loss."""
        losses = []
        size, settings = self._student.batch_size, self._settings
        num_replayed = round(size * settings.replay_share) if replayed else 0
        num_fresh = round((size - num_replayed) * _FRESH_SHARE)
        since_s, self._last_lesson_s = self._last_lesson_s, self._clock()
        fresh = [example for example in recent if example.arrived_s >= since_s] or recent
        for _ in range(settings.lesson_updates):
            if stop.is_set():
                break
            self._call()
            start_s = time.perf_counter()
            batch = self._draw(replayed, num_replayed) + self._draw(fresh, num_fresh)
            batch += self._draw(recent, size - len(batch))
            losses.append(self._student.learn(batch, self._generator))
            self._spend(time.perf_counter() - start_s)
            if self._rest_s > 0.0:
                stop.wait(self._rest_s)
                self._rest_s = 0.0
        return sum(losses) / max(len(losses), 1)

    def _call(self) -> None:
        while not self._calls.empty():
            self._calls.get()()

    def _spend(self, busy_s: float) -> None:
        self.figures.busy_s += busy_s
        self._rest_s += busy_s / self._settings.busy_share - busy_s

    def _draw(self, examples: list[Example], count: int) -> list[Example]:
        return self._random.choices(examples, k=count)

    def _measure(self, state: State, examples: list[Example]) -> Measurement:
        start_s = time.perf_counter()
        with self._student.with_weights(state):
            measurement = self._student.measure(examples, num_steps=NUM_STEPS)
        self._spend(time.perf_counter() - start_s)
        return measurement

    def _send(self, served: _Version) -> bool:
        try:
            self._publish(served.folder, served.version)
        except OutriderError as error:
            log.error("version %d was not swapped in: %s", served.version, error.message)
            return False
        return True

    def _report(
        self, event: str, loss: float, before: Measurement | None, after: Measurement | None
    ) -> LessonReport:
        figures = self.figures
        old, new = (None if m is None else round(m.mean_length, 4) for m in (before, after))
        report = LessonReport(
            figures.num_lessons, self.version, event, self._traffic.num_tokens, loss, old, new
        )
        figures.version, figures.loss = self.version, loss
        figures.accepted_before, figures.accepted_after = old or 0.0, new or 0.0
        self._settings.out.mkdir(parents=True, exist_ok=True)
        with (self._settings.out / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time_s": round(time.time(), 1), **asdict(report)}) + "\n")
        shown = "" if old is None else f", {old:.3f} tokens a round before, {new:.3f} after"
        log.info("lesson %d: %s, loss %.3f%s", figures.num_lessons, event, loss, shown)
        return report

    def _drop_old(self) -> None:
        kept = {version.folder for version in (self._served, self._previous) if version is not None}
        for folder in self._settings.out.glob("version-*"):
            is_old = _version_of(folder) <= self._latest_version - self._settings.versions_kept
            if is_old and folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def _version_of(folder: Path) -> int:
    number = folder.name.removeprefix("version-")
    return int(number) if number.isdecimal() else 0
