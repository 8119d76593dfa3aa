"""Modes of decoding, and passes over all prompts in one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from shared.tokens import TreeShape
from tests.bench.pair import Pair
from tests.bench.session import Answer, OnTokens


@dataclass(frozen=True, slots=True)
class Mode:
    """How tokens are made; no shape is plain decoding, budget 0 drafts after each verdict.

    Attributes:
        is_chosen: the draft is as it was started, and the target chooses what pays.
    """

    shape: TreeShape | None = None
    budget: int = 0
    is_chosen: bool = False

    @property
    def name(self) -> str:
        if self.shape is None:
            return "as chosen" if self.is_chosen else "plain"
        shape = self.shape
        tree = f"{shape.num_steps},{shape.topk},{shape.num_draft_tokens}"
        return f"{tree}, {self.budget} ahead" if self.budget else f"{tree}, synchronous"

    @property
    def is_ahead(self) -> bool:
        """Whether trees may come ahead of verdicts."""
        return self.is_chosen or self.budget > 0

    @property
    def is_plain(self) -> bool:
        return self.shape is None and not self.is_chosen


PLAIN, CHOSEN = Mode(), Mode(is_chosen=True)


@dataclass(frozen=True, slots=True)
class Case:
    """What all modes are compared at."""

    temperature: float
    concurrency: int

    @property
    def name(self) -> str:
        return f"temperature {self.temperature:g}, {self.concurrency} at a time"


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for.

    Attributes:
        prompts: enough for every case.
        num_prompts: of a pass, unless more are asked at a time.
        num_tokens: of an answer.
    """

    prompts: Sequence[Sequence[int]]
    num_prompts: int
    num_tokens: int

    def of(self, case: Case) -> Sequence[Sequence[int]]:
        """Returns the prompts of a pass."""
        return self.prompts[: max(self.num_prompts, case.concurrency)]


@dataclass(frozen=True, slots=True)
class Pass:
    """All prompts answered once in one mode.

    Attributes:
        counters: what was counted meanwhile, by metric.
    """

    answers: tuple[Answer, ...]
    duration_s: float
    counters: Mapping[str, float]

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.duration_s

    @property
    def num_rounds(self) -> int:
        return sum(answer.num_rounds for answer in self.answers)

    @property
    def round_tokens(self) -> float:
        """Tokens a round, bonus included."""
        return self.num_tokens / self.num_rounds

    @property
    def num_steps(self) -> float:
        """Forwards of the target; sequences that decode at once share them."""
        return max(self.counters.get("outrider_target_steps_total", 0.0), 1.0)

    def per_round(self, counter: str) -> float:
        return self.counters.get(f"{counter}_total", 0.0) / max(self.num_rounds, 1)

    def wire_bytes_per_s(self, direction: str) -> float:
        """Returns the bytes a second on the stream with the draft; `sent` are the target's."""
        name = f'outrider_target_wire_bytes_total{{direction="{direction}"}}'
        return self.counters.get(name, 0.0) / self.duration_s

    def ms_a_step(self, *metrics: str) -> float:
        """Returns the milliseconds that some metrics of seconds gained a step."""
        return 1e3 * sum(self.counters.get(name, 0.0) for name in metrics) / self.num_steps

    def num_same(self, other: Pass) -> int:
        """Counts the answers that are the other's, token for token."""
        return len(self.answers) - len(self._differences(other))

    def same_answers(self, other: Pass) -> str:
        """Returns how many answers are the other's, and for the rest the first token that is not:
        number of the answer, number of the token, this token and the other's."""
        same = f"{self.num_same(other)}/{len(self.answers)}"
        return "; ".join((same, *self._differences(other)))

    def _differences(self, other: Pass) -> list[str]:
        differences: list[str] = []
        for number, (mine, theirs) in enumerate(zip(self.answers, other.answers, strict=True)):
            if mine.token_ids != theirs.token_ids:
                pairs = list(zip_longest(mine.token_ids, theirs.token_ids))
                place = next(k for k, (own, their) in enumerate(pairs) if own != their)
                differences.append(f"{number}, token {place}: {pairs[place][0]}/{pairs[place][1]}")
        return differences


async def answer_all(
    pair: Pair,
    mode: Mode,
    case: Case,
    load: Load,
    *,
    on_tokens: OnTokens | None = None,
) -> Pass:
    """Answers every prompt of the case once; the draft has been told the mode."""
    places = asyncio.Semaphore(case.concurrency)

    async def answer(seed: int, prompt: Sequence[int]) -> Answer:
        async with places:
            return await pair.answer(
                prompt,
                num_tokens=load.num_tokens,
                temperature=case.temperature,
                seed=seed,
                is_plain=mode.is_plain,
                on_tokens=on_tokens,
            )

    before, start_s = await pair.counters(), time.perf_counter()
    answers = await asyncio.gather(*(answer(*each) for each in enumerate(load.of(case))))
    duration_s, after = time.perf_counter() - start_s, await pair.counters()
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return Pass(tuple(answers), duration_s, gained)


async def set_mode(pair: Pair, mode: Mode) -> None:
    """Tells the draft, unless it drafts nothing, or what it likes."""
    if mode.shape is not None:
        await pair.set_mode(mode.shape, mode.budget)


async def measure(
    pair: Pair, modes: Sequence[Mode], case: Case, load: Load, num_repeats: int
) -> list[list[Pass]]:
    """Returns the passes of each repeat, in the order of the modes; every repeat measures every
    mode in turn, so that a slow minute hits all of them."""
    for mode in modes:
        await warm_up(pair, mode, case, load)
    repeats: list[list[Pass]] = []
    for _ in range(num_repeats):
        passes: list[Pass] = []
        for mode in modes:
            await set_mode(pair, mode)
            passes.append(await answer_all(pair, mode, case, load))
        repeats.append(passes)
    return repeats


WARM_UP_TOKENS = 24
MOST_WARM_UPS = 12
"""A draft compiles and captures what a mode needs while it is first used, and is left alone for a
while if that took long."""
_PREPARATIONS = "outrider_draft_preparations_total"


async def warm_up(pair: Pair, mode: Mode, case: Case, load: Load) -> None:
    """Begins every answer, until the draft has nothing to prepare any more and is drafted with:
    kernels, graphs and prompts of the mode are there afterwards. What is chosen follows from what
    was measured, so then every answer is given once."""
    await set_mode(pair, mode)
    few = Load(load.prompts, load.num_prompts, min(load.num_tokens, WARM_UP_TOKENS))
    for _ in range(MOST_WARM_UPS):
        warmed = await answer_all(pair, mode, case, few)
        is_quiet = not warmed.counters.get(_PREPARATIONS)
        if is_quiet and (mode.shape is None or warmed.round_tokens > 1.0):
            break
    if mode.is_chosen:
        await answer_all(pair, mode, case, load)
