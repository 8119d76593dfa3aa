"""What an engine under measurement reports: when it committed what, and its answers."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.target.requests.request import Event, Finished
from services.target.step_report import StepReport
from shared.generation import Delta


@dataclass
class StepTimes:
    """When each step was committed, and its report; written on the engine thread."""

    reports: list[tuple[float, StepReport]] = field(default_factory=list)

    def observe(self, report: StepReport) -> None:
        """Takes a report."""
        self.reports.append((time.perf_counter(), report))

    def shared_steps(self, first_ended_s: float) -> list[tuple[float, StepReport]]:
        """Returns duration in s and report of the steps between the last one with a prompt in it
        and the end of the first sequence; drafts may keep some sequences out of a step."""
        prompts = [place for place, (_, each) in enumerate(self.reports) if each.num_prompt_rows]
        decoding = self.reports[prompts[-1] if prompts else 0 :]
        return [
            (at_s - before_s, report)
            for (before_s, _), (at_s, report) in itertools.pairwise(decoding)
            if at_s < first_ended_s
        ]

    def decode_steps(self, num_sequences: int) -> list[tuple[float, StepReport]]:
        """Returns duration in ms and report of the steps in which every sequence decodes."""
        return [
            ((at_s - before_s) * 1e3, report)
            for (before_s, before), (at_s, report) in zip(
                self.reports, self.reports[1:], strict=False
            )
            if before.num_rounds == report.num_rounds == report.num_rows == num_sequences
        ]


@dataclass
class Answers:
    """A sink that keeps tokens and tells when all requests have ended.

    Attributes:
        when_ended: called then, on the engine thread, before another step.
    """

    num_requests: int
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    all_ended: threading.Event = field(default_factory=threading.Event)
    num_ended: int = 0
    first_ended_s: float = math.inf
    when_ended: Callable[[], None] = lambda: None

    def deliver(self, events: Sequence[tuple[int, Event]]) -> None:
        """Takes the events of a step."""
        for key, event in events:
            if isinstance(event, Delta):
                self.token_ids.setdefault(key, []).extend(event.token_ids)
            if isinstance(event, Finished):
                self.num_ended += 1
                self.first_ended_s = min(self.first_ended_s, time.perf_counter())
        if self.num_ended == self.num_requests:
            self.when_ended()
            self.all_ended.set()

    def __hash__(self) -> int:
        return id(self)
