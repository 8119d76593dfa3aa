"""Drafts that are hurt in the middle of a pass: what is left of the speed, and of the answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.pair import Pair
from tests.bench.passes import Case, Load, Mode, Pass, answer_all, warm_up
from tests.bench.trigger import Trigger
from tests.bench.wire_process import WireProcess
from tests.load.figures import table

SLOW_MS = 50.0
_TOKENS_BEFORE = 16
"""Tokens of each sequence that decodes before the draft is hurt: it has answered by then."""
_LEAST_BYTES_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What can be hurt.

    Attributes:
        wire: between target and draft; None where they share memory, if they can.
        usual: a pass without a hurt.
    """

    pair: Pair
    wire: WireProcess | None
    usual: Pass


Act = Callable[[Scene], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Hurt:
    """What happens to a draft.

    Attributes:
        begin: does it.
        end: takes it back; None where the draft is of no use afterwards.
    """

    name: str
    begin: Act
    end: Act | None = None


async def _kill(scene: Scene) -> None:
    assert scene.pair.draft is not None
    scene.pair.draft.kill()


async def _freeze(scene: Scene) -> None:
    assert scene.pair.draft is not None
    scene.pair.draft.freeze()


async def _thaw(scene: Scene) -> None:
    assert scene.pair.draft is not None
    scene.pair.draft.thaw()
    await scene.pair.until_up()


async def _delay(scene: Scene) -> None:
    assert scene.wire is not None
    await scene.wire.lay(there_ms=SLOW_MS)


async def _narrow(scene: Scene) -> None:
    """Leaves half of what the draft has used each way."""
    assert scene.wire is not None
    to_draft, to_target = (scene.usual.wire_bytes_per_s(way) for way in ("sent", "received"))
    await scene.wire.lay(
        there_bytes_per_s=max(to_target / 2, _LEAST_BYTES_PER_S),
        back_bytes_per_s=max(to_draft / 2, _LEAST_BYTES_PER_S),
    )


async def _restore(scene: Scene) -> None:
    assert scene.wire is not None
    await scene.wire.lay()


def _disorder(state: str) -> Act:
    async def act(scene: Scene) -> None:
        assert scene.pair.draft is not None
        await scene.pair.draft.tell(f"disorder {state}")

    return act


KILLED = Hurt("killed", _kill)
FROZEN = Hurt("frozen", _freeze, _thaw)
SLOW = Hurt(f"slow: candidates {SLOW_MS:g} ms late", _delay, _restore)
DISORDERED = Hurt("candidates twice, in no order", _disorder("on"), _disorder("off"))
NARROW = Hurt("half the bandwidth it used", _narrow, _restore)


@dataclass(frozen=True, slots=True)
class HurtPass:
    """A pass with a draft that was hurt.

    Attributes:
        since_s: when it was.
        concurrency: answers at a time.
    """

    name: str
    whole: Pass
    since_s: float
    concurrency: int

    @property
    def tokens_per_s(self) -> float:
        """From the hurt until fewer answers are left than run at a time: a smaller batch makes
        fewer tokens a step."""
        ends_s = sorted(answer.arrivals[-1][0] for answer in self.whole.answers)
        until_s = ends_s[-self.concurrency]
        if until_s <= self.since_s:
            return 0.0
        times = (each for answer in self.whole.answers for each in answer.arrivals)
        num_tokens = sum(count for at_s, count in times if self.since_s < at_s <= until_s)
        return num_tokens / (until_s - self.since_s)

    @property
    def longest_pause_s(self) -> float:
        """The longest time between two arrivals of an answer, of those that end later."""
        pauses = [
            later - earlier
            for answer in self.whole.answers
            for (earlier, _), (later, _) in zip(answer.arrivals, answer.arrivals[1:], strict=False)
            if later > self.since_s
        ]
        return max(pauses, default=0.0)


def unhurt(name: str, whole: Pass, case: Case) -> HurtPass:
    """Returns a pass as from where a draft would have been hurt on."""
    num_left, times = (
        _num_before(case),
        (each for answer in whole.answers for each in answer.arrivals),
    )
    for at_s, count in sorted(times):
        num_left -= count
        if num_left <= 0:
            return HurtPass(name, whole, at_s, case.concurrency)
    return HurtPass(name, whole, math.inf, case.concurrency)


def _num_before(case: Case) -> int:
    return _TOKENS_BEFORE * case.concurrency


@dataclass(frozen=True, slots=True)
class HurtBench:
    """Passes in one mode and case, each with another hurt.

    Attributes:
        usual: a pass without a hurt.
    """

    pair: Pair
    wire: WireProcess | None
    mode: Mode
    case: Case
    load: Load
    usual: Pass

    async def measure(self, hurt: Hurt) -> HurtPass:
        """Answers all prompts; the draft is hurt after the first tokens."""
        await warm_up(self.pair, self.mode, self.case, self.load)
        scene = Scene(self.pair, self.wire, self.usual)
        trigger = Trigger(lambda: hurt.begin(scene), _num_before(self.case))
        whole = await answer_all(
            self.pair, self.mode, self.case, self.load, on_tokens=trigger.count
        )
        await trigger.done()
        if hurt.end is not None:
            await hurt.end(scene)
        return HurtPass(hurt.name, whole, trigger.at_s, self.case.concurrency)


def report(case: Case, passes: Sequence[HurtPass], plain: Pass) -> str:
    """Returns the table of all hurts beside plain decoding, each from the same token on."""
    header = ("draft", "tok/s since", "vs plain", "longest pause ms", "same answers")
    base = unhurt("plain decoding", plain, case)
    rows = [
        (
            each.name,
            f"{each.tokens_per_s:.1f}",
            f"{each.tokens_per_s / base.tokens_per_s:.2f}",
            f"{1e3 * each.longest_pause_s:.0f}",
            each.whole.same_answers(plain),
        )
        for each in (base, *passes)
    ]
    return f"{case.name}\n{table(header, rows)}"
