"""Drafts that are hurt in the middle of a pass: what is left of the speed, and of the answers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.bench.pair import Pair
from tests.bench.passes import Case, Load, Mode, Pass, answer_all, set_mode, warm_up
from tests.bench.trigger import Trigger
from tests.bench.wire_process import WireProcess
from tests.load.figures import table

SLOW_MS = 50.0
_TOKENS_BEFORE = 16
"""Tokens of a pass that come before the draft is hurt: it has answered by then."""

Act = Callable[[Pair, WireProcess | None], Coroutine[Any, Any, None]]


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


async def _kill(pair: Pair, wire: WireProcess | None) -> None:
    assert pair.draft is not None
    pair.draft.kill()


async def _freeze(pair: Pair, wire: WireProcess | None) -> None:
    assert pair.draft is not None
    pair.draft.freeze()


def _delay(delay_ms: float) -> Act:
    async def act(pair: Pair, wire: WireProcess | None) -> None:
        assert wire is not None
        await wire.delay(there_ms=delay_ms, back_ms=0.0)

    return act


def _disorder(state: str) -> Act:
    async def act(pair: Pair, wire: WireProcess | None) -> None:
        assert pair.draft is not None
        await pair.draft.tell(f"disorder {state}")

    return act


KILLED = Hurt("killed", _kill)
FROZEN = Hurt("frozen", _freeze)
SLOW = Hurt(f"slow: candidates {SLOW_MS:g} ms late", _delay(SLOW_MS), _delay(0.0))
DISORDERED = Hurt("candidates twice, in no order", _disorder("on"), _disorder("off"))


@dataclass(frozen=True, slots=True)
class HurtPass:
    """A pass with a draft that was hurt.

    Attributes:
        hurt_s: when it was.
    """

    name: str
    whole: Pass
    hurt_s: float

    @property
    def tokens_per_s(self) -> float:
        """From the hurt to the last token."""
        times = [each for answer in self.whole.answers for each in answer.arrivals]
        after = [(at_s, count) for at_s, count in times if at_s > self.hurt_s]
        if not after:
            return 0.0
        return sum(count for _, count in after) / (max(at_s for at_s, _ in after) - self.hurt_s)

    @property
    def longest_pause_s(self) -> float:
        """The longest time between two arrivals of an answer, from the hurt on."""
        return longest_pause_s(self.whole, self.hurt_s)


def longest_pause_s(whole: Pass, since_s: float = 0.0) -> float:
    """Returns the longest time between two arrivals of one answer, of those that end later."""
    pauses = [
        later - earlier
        for answer in whole.answers
        for (earlier, _), (later, _) in zip(answer.arrivals, answer.arrivals[1:], strict=False)
        if later > since_s
    ]
    return max(pauses, default=0.0)


@dataclass(frozen=True, slots=True)
class HurtBench:
    """Passes in one mode and case, each with another hurt.

    Attributes:
        is_adaptive: the target may ask for other shapes than the mode's.
    """

    pair: Pair
    mode: Mode
    case: Case
    load: Load
    is_adaptive: bool

    async def measure(self, hurt: Hurt, wire: WireProcess | None = None) -> HurtPass:
        """Answers all prompts; the draft is hurt after the first tokens."""
        mode = replace(self.mode, is_chosen=self.is_adaptive)
        await warm_up(self.pair, self.mode, self.case, self.load)
        await set_mode(self.pair, mode)
        trigger = Trigger(lambda: hurt.begin(self.pair, wire), _TOKENS_BEFORE)
        whole = await answer_all(self.pair, mode, self.case, self.load, on_tokens=trigger.count)
        await trigger.done()
        if hurt.end is not None:
            await hurt.end(self.pair, wire)
        return HurtPass(hurt.name, whole, trigger.at_s)


def report(passes: Sequence[HurtPass], plain: Pass) -> str:
    """Returns the table of all hurts beside plain decoding."""
    header = ("draft", "tok/s since", "vs plain", "longest pause ms", "same answers")
    rows = [("plain decoding", plain.tokens_per_s, longest_pause_s(plain), plain)]
    rows += [(each.name, each.tokens_per_s, each.longest_pause_s, each.whole) for each in passes]
    return table(
        header,
        [
            (
                name,
                f"{speed:.1f}",
                f"{speed / plain.tokens_per_s:.2f}",
                f"{1e3 * pause_s:.0f}",
                f"{whole.num_same(plain)}/{len(whole.answers)}",
            )
            for name, speed, pause_s, whole in rows
        ],
    )
