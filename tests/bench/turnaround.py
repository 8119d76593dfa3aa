"""What lies between a verdict and the step that its tree begins, where nothing was pushed ahead."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import zip_longest
from typing import TypeVar

from tests.bench.round_svg import Box, Message, Rounds
from tests.load.figures import table

T = TypeVar("T")

_NAMES = (
    "verdict to message",
    "message to the draft",
    "until it drafts",
    "drafts",
    "tree to message",
    "message to the target",
    "until it verifies",
)


@dataclass(frozen=True, slots=True)
class Turnaround:
    """One, in seconds from part to part; see `_NAMES`."""

    told_s: float
    there_s: float
    taken_up_s: float
    drafted_s: float
    answered_s: float
    back_s: float
    launched_s: float


def turnarounds(rounds: Rounds) -> list[Turnaround]:
    """Returns those of a log of one sequence at a time."""
    return list(_turnarounds(rounds))


def report(rounds: Rounds) -> str:
    """Returns a table of medians."""
    found = turnarounds(rounds)
    if not found:
        return "no verdict of these rounds was answered by one tree"
    parts = [
        1e3 * statistics.median(astuple(each)[place] for each in found)
        for place in range(len(fields(Turnaround)))
    ]
    rows = [(name, f"{ms:.2f}") for name, ms in zip(_NAMES, parts, strict=True)]
    total_ms = 1e3 * statistics.median(sum(astuple(each)) for each in found)
    return table((f"median of {len(found)}", "ms"), [*rows, ("all", f"{total_ms:.2f}")])


def _turnarounds(rounds: Rounds) -> Iterator[Turnaround]:
    verdicts = [each for each in rounds.messages if each.from_target and each.kind == "verdicts"]
    trees = [each for each in rounds.messages if each.kind == "candidates"]
    drafts = [each for each in rounds.drafts if each.kind == "propose"]
    ends = sorted(step.end_s for step in rounds.steps)
    starts = sorted(step.start_s for step in rounds.steps)
    for verdict, following in zip_longest(verdicts, verdicts[1:]):
        until_s = float("inf") if following is None else following.sent_s
        draft = _only([each for each in drafts if verdict.received_s <= each.start_s < until_s])
        tree = _only([each for each in trees if verdict.received_s <= each.sent_s < until_s])
        end = bisect_right(ends, verdict.sent_s) - 1
        if draft is None or tree is None or end < 0:
            continue
        start = bisect_left(starts, tree.received_s)
        if start < len(starts) and starts[start] < until_s:
            yield _turnaround(ends[end], verdict, draft, tree, starts[start])


def _turnaround(
    end_s: float, verdict: Message, draft: Box, tree: Message, start_s: float
) -> Turnaround:
    return Turnaround(
        told_s=verdict.sent_s - end_s,
        there_s=verdict.received_s - verdict.sent_s,
        taken_up_s=draft.start_s - verdict.received_s,
        drafted_s=draft.end_s - draft.start_s,
        answered_s=tree.sent_s - draft.end_s,
        back_s=tree.received_s - tree.sent_s,
        launched_s=start_s - tree.received_s,
    )


def _only(found: Sequence[T]) -> T | None:
    return found[0] if len(found) == 1 else None
