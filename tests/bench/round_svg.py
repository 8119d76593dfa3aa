"""A few rounds as a picture: what the target did, what the draft did, what was on the wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, MARGIN, LANE = 1400, 90, 34
TARGET_Y, DRAFT_Y, HEIGHT = 60, 260, 380
COLOURS = {
    "hit": "#2a9d5c",
    "late": "#e0a526",
    "miss": "#c8553d",
    "prepared": "#2a9d5c",
    "tree": "#4fa3a5",
    "plain": "#8a8f98",
    "propose": "#3b6fb6",
    "select": "#1f3f6b",
    "ahead": "#9cbbe0",
    "read": "#b9a3d6",
    "prepare": "#d9d2c5",
}
DRAFT_SPANS = frozenset({"propose", "select", "ahead", "read", "prepare"})
MEANINGS = {
    "hit": "step whose verdict had been prepared for",
    "late": "step that began with a tree that came after its verdict",
    "miss": "step whose verdict had not been prepared for",
    "prepared": "step with trees that had been prepared",
    "tree": "step with trees",
    "plain": "step without a tree",
    "propose": "draft after a verdict",
    "select": "draft hands out what it had prepared",
    "ahead": "draft ahead of a verdict, one pass or forward",
    "read": "draft reads committed tokens",
    "prepare": "draft prepares something once",
}


@dataclass(frozen=True, slots=True)
class Box:
    """Something that took time.

    Attributes:
        what: of it, beside its kind.
    """

    kind: str
    start_s: float
    end_s: float
    what: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """Something on its way between the two."""

    kind: str
    from_target: bool
    sent_s: float
    received_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """What both logs say, in order of time."""

    steps: tuple[Box, ...]
    drafts: tuple[Box, ...]
    messages: tuple[Message, ...]

    @property
    def idle_share(self) -> float:
        """Share of the time from the first step to the last in which the target ran none."""
        if not self.steps:
            return 0.0
        total_s = self.steps[-1].end_s - self.steps[0].start_s
        busy_s = sum(step.end_s - step.start_s for step in self.steps)
        return max(1.0 - busy_s / total_s, 0.0)

    def window(self, first_step: int, num_steps: int) -> Rounds:
        """Returns what happened during some of the steps."""
        steps = self.steps[first_step : first_step + num_steps]
        if not steps:
            return Rounds((), (), ())
        start_s, end_s = steps[0].start_s, steps[-1].end_s
        return Rounds(
            steps,
            tuple(each for each in self.drafts if each.end_s > start_s and each.start_s < end_s),
            tuple(
                each for each in self.messages if each.received_s > start_s and each.sent_s < end_s
            ),
        )


def read_rounds(target_log: Path, draft_log: Path) -> Rounds:
    """Reads the logs of a target and of a draft on the same host."""
    target, draft = list(_records(target_log)), list(_records(draft_log))
    steps = (_step(record) for record in target if record["name"] == "step")
    drafts = (Box(r["name"], r["start_s"], r["end_s"]) for r in draft if r["name"] in DRAFT_SPANS)
    messages = [
        *_messages(target, draft, from_target=True),
        *_messages(draft, target, from_target=False),
    ]
    return Rounds(
        tuple(sorted(steps, key=lambda each: each.start_s)),
        tuple(sorted(drafts, key=lambda each: each.start_s)),
        tuple(sorted(messages, key=lambda each: each.sent_s)),
    )


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing and what it shows, in words."""

    svg: str
    title: str


def picture(rounds: Rounds, num_steps: int, first_step: int | None = None) -> Picture:
    """Draws some steps, by default about three quarters through the log.

    Raises:
        ValueError: the log has no such steps.
    """
    if first_step is None:
        first_step = max(len(rounds.steps) * 3 // 4 - num_steps // 2, 0)
    shown = rounds.window(first_step, num_steps)
    if not shown.steps:
        raise ValueError(f"the log has {len(rounds.steps)} steps; none from {first_step} on")
    num_hits = sum(step.kind in ("hit", "prepared") for step in shown.steps)
    title = (
        f"{len(shown.steps)} steps, {num_hits} verdicts prepared for in time; "
        f"the target idles {shown.idle_share:.0%} of the time"
    )
    return Picture(draw_rounds(shown, title), title)


def draw_rounds(rounds: Rounds, title: str) -> str:
    """Returns an SVG document."""
    start_s, end_s = rounds.steps[0].start_s, rounds.steps[-1].end_s
    scale = (WIDTH - MARGIN - 20) / max(end_s - start_s, 1e-9)

    def x(time_s: float) -> float:
        return MARGIN + (min(max(time_s, start_s), end_s) - start_s) * scale

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="15">{escape(title)}</text>',
        *_axis(end_s - start_s, scale),
    ]
    for name, y in (("target", TARGET_Y), ("draft", DRAFT_Y)):
        parts.append(f'<text x="12" y="{y + LANE / 2 + 5}">{name}</text>')
        parts.append(
            f'<rect x="{MARGIN}" y="{y}" width="{WIDTH - MARGIN - 20}" height="{LANE}" '
            'fill="#f2f2f2"/>'
        )
    parts.append(f'<text x="12" y="{(TARGET_Y + LANE + DRAFT_Y) / 2 + 5}">wire</text>')
    parts += [_line(each, x) for each in rounds.messages]
    parts += [_box(each, x, TARGET_Y) for each in rounds.steps]
    parts += [_box(each, x, DRAFT_Y) for each in rounds.drafts]
    shown = {each.kind for each in (*rounds.steps, *rounds.drafts)}
    parts += _legend([kind for kind in COLOURS if kind in shown])
    return "\n".join([*parts, "</svg>", ""])


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            if not isinstance(record, dict) or "name" not in record:
                raise ValueError(f"{path}, line {number}: no record of a round log")
            yield record


def _step(step: dict[str, Any]) -> Box:
    kinds = (
        *(("hit", step["hits"]), ("late", step["late"]), ("miss", step["misses"])),
        *(("prepared", step["ahead"] and step["drafted"]), ("tree", step["drafted"])),
    )
    kind = next((kind for kind, is_it in kinds if is_it), "plain")
    what = (
        f", {step['sequences']} sequences, {step['drafted']} nodes, {step['committed']} tokens kept"
    )
    return Box(kind, step["start_s"], step["end_s"], what)


def _messages(
    sender: Iterable[dict[str, Any]], receiver: Iterable[dict[str, Any]], *, from_target: bool
) -> Iterator[Message]:
    """A stream keeps order, so the n-th message sent on it is the n-th received."""
    received = {(r["stream"], r["number"]): r["at_s"] for r in receiver if r["name"] == "received"}
    for record in sender:
        key = (record.get("stream"), record.get("number"))
        if record["name"] == "sent" and key in received:
            yield Message(
                record["kind"], from_target, record["at_s"], received[key], record["bytes"]
            )


def _axis(length_s: float, scale: float) -> list[str]:
    step_s = next(
        (
            s
            for s in (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1)
            if s * 16 > length_s
        ),
        0.5,
    )
    parts = []
    for tick in range(int(length_s / step_s) + 1):
        x = MARGIN + tick * step_s * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{TARGET_Y - 8}" x2="{x:.1f}" y2="{DRAFT_Y + LANE}" '
            'stroke="#dddddd"/>'
            f'<text x="{x:.1f}" y="{TARGET_Y - 12}" text-anchor="middle" font-size="11">'
            f"{tick * step_s * 1e3:g}{' ms' if not tick else ''}</text>"
        )
    return parts


def _box(box: Box, x: Callable[[float], float], y: int) -> str:
    left, right = x(box.start_s), x(box.end_s)
    took_ms = (box.end_s - box.start_s) * 1e3
    return (
        f'<rect x="{left:.1f}" y="{y}" width="{max(right - left, 1.0):.1f}" height="{LANE}" '
        f'fill="{COLOURS[box.kind]}" stroke="white" stroke-width="0.5">'
        f"<title>{escape(MEANINGS[box.kind])}: {took_ms:.2f} ms{box.what}</title></rect>"
    )


def _line(message: Message, x: Callable[[float], float]) -> str:
    ends = (TARGET_Y + LANE, DRAFT_Y) if message.from_target else (DRAFT_Y, TARGET_Y + LANE)
    colour = "#555555" if message.from_target else "#3b6fb6"
    took_ms = (message.received_s - message.sent_s) * 1e3
    return (
        f'<line x1="{x(message.sent_s):.1f}" y1="{ends[0]}" x2="{x(message.received_s):.1f}" '
        f'y2="{ends[1]}" stroke="{colour}" stroke-width="1.2">'
        f"<title>{escape(message.kind)}: {message.num_bytes} bytes, {took_ms:.2f} ms</title></line>"
    )


def _legend(kinds: Sequence[str]) -> list[str]:
    parts = []
    for place, kind in enumerate(kinds):
        x, y = MARGIN + (place % 3) * 420, DRAFT_Y + LANE + 24 + (place // 3) * 20
        parts.append(
            f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind]}"/>'
            f'<text x="{x + 18}" y="{y}">{escape(MEANINGS[kind])}</text>'
        )
    return parts
