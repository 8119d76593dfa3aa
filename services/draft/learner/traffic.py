"""Sequences to learn from: how they come, how long they are kept, and which are held out.

Whoever asks for the hidden states of a target does so in `events`; here they are examples.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from services.draft.engine import Deliver
from services.draft.events import (
    Event,
    FeaturesArrived,
    LinkClosed,
    LinkTerms,
    Opening,
    SequencesOpened,
    WeightsUpdated,
)

_SPLITS = 1000
_FEWEST_PROMPT_TOKENS = 16
"""Of a recorded text nobody knows where the prompt ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A sequence that has ended.

    Attributes:
        token_ids: N of them, prompt first.
        rows: `[N - 1, W]`, what the head reads at the positions of all but the last token.
        num_prompt_tokens: how many of the tokens nobody drafts.
        arrived_s: by the clock of the traffic.
    """

    token_ids: tuple[int, ...]
    rows: Tensor
    num_prompt_tokens: int
    arrived_s: float = 0.0

    @property
    def num_drafted(self) -> int:
        """Tokens that a draft could have proposed: of the first one behind the prompt the row
        before has no state yet."""
        return len(self.token_ids) - max(self.num_prompt_tokens + 1, 2)


class Traffic:
    """Takes what targets tell a learner, as a draft's engine does. Filled by one thread, read by
    another.

    Args:
        max_tokens: of all examples together, which stay in memory; the oldest go first.
        max_age_s: of an example; None keeps it as long as there is room.
        held_out_share: of the traffic, by prompt; never trained on.
        replay_share: of `max_tokens`, for a sample of all that came since the start.

    Attributes:
        num_examples, num_tokens: that came since the start.
        num_forgotten: times that everything was dropped.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_tokens: int = 200_000,
        max_age_s: float | None = None,
        held_out_share: float = 0.1,
        replay_share: float = 0.25,
    ) -> None:
        self.num_examples = self.num_tokens = self.num_forgotten = 0
        self._max_age_s, self._held_out_share, self._clock = max_age_s, held_out_share, clock
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._link_numbers = itertools.count(1)
        self._links: set[int] = set()
        self._open: dict[tuple[int, int], _Partial] = {}
        replayed = round(max_tokens * replay_share)
        held_out = round((max_tokens - replayed) * held_out_share)
        self._held_out = _Kept(held_out)
        self._recent = _Kept(max_tokens - replayed - held_out)
        self._replay = _Kept(replayed)

    # As an engine, for links.

    def open_link(self, terms: LinkTerms, deliver: Deliver) -> int:
        """A target accepted the learner; nothing is ever delivered to it."""
        del terms, deliver
        with self._lock:
            link = next(self._link_numbers)
            self._links.add(link)
            return link

    def close_link(self, link: int) -> None:
        """A target went, and took along what it had not told to the end."""
        self.submit(LinkClosed(link))

    def submit(self, event: Event) -> None:
        """Takes an event in; those that only a draft needs are nothing."""
        if isinstance(event, WeightsUpdated):
            self.forget()
        with self._lock:
            match event:
                case SequencesOpened():
                    for opening in event.openings:
                        self._open[event.link, opening.sequence_id] = _Partial(opening)
                case FeaturesArrived():
                    self._add_rows((event.link, event.sequence_id), event)
                case LinkClosed():
                    self._links.discard(event.link)
                    for key in [key for key in self._open if key[0] == event.link]:
                        del self._open[key]
                case _:
                    pass

    def _add_rows(self, key: tuple[int, int], event: FeaturesArrived) -> None:
        partial = self._open.get(key)
        if partial is None:
            return
        partial.pieces.append(event.rows.rows)
        if sum(map(len, partial.pieces)) >= len(partial.opening.token_ids) - 1:
            del self._open[key]
            self._keep(partial.example(self._clock()))

    # For whoever learns.

    def add(self, example: Example, *, is_old: bool = False) -> None:
        """Takes a recorded sequence; an old one is only replayed."""
        with self._lock:
            if is_old:
                self._replay.add(example)
            else:
                self._keep(example)

    def recent(self) -> list[Example]:
        """Returns recent examples for training, oldest first."""
        return self._read(self._recent)

    def replayed(self) -> list[Example]:
        """Returns a sample of all that ever came and may be trained on."""
        return self._read(self._replay)

    def held_out(self, *, since_s: float = 0.0) -> list[Example]:
        """Returns held-out examples that arrived at `since_s` or later."""
        return [each for each in self._read(self._held_out) if each.arrived_s >= since_s]

    def kept(self) -> list[Example]:
        """Returns all that is in memory."""
        return [*self._read(self._replay), *self._read(self._recent), *self._read(self._held_out)]

    def forget(self) -> None:
        """Drops everything: the target's hidden states mean something else from now on."""
        with self._lock:
            self.num_forgotten += 1
            for kept in (self._recent, self._replay, self._held_out):
                kept.clear()
            self._open.clear()

    @property
    def num_links(self) -> int:
        """Targets that it learns from now."""
        return len(self._links)

    @property
    def num_kept_tokens(self) -> int:
        """In memory."""
        return sum(each.num_tokens for each in (self._recent, self._replay, self._held_out))

    def _read(self, kept: _Kept) -> list[Example]:
        with self._lock:
            if self._max_age_s is not None:
                kept.drop_before(self._clock() - self._max_age_s)
            return kept.all()

    def _keep(self, example: Example) -> None:
        if example.num_drafted < 1:
            return
        self.num_examples += 1
        self.num_tokens += len(example.token_ids)
        if _is_held_out(example, self._held_out_share):
            self._held_out.add(example)
            return
        for dropped in self._recent.add(example):
            # What leaves the window is replayed as likely as anything that left it before.
            if self._random.random() < 0.5:
                self._replay.add(dropped, at_random=self._random)


@dataclass(slots=True)
class _Partial:
    opening: Opening
    pieces: list[Tensor] = field(default_factory=list)

    def example(self, now_s: float) -> Example:
        import torch

        opening = self.opening
        rows = torch.cat(self.pieces)[: len(opening.token_ids) - 1]
        return Example(tuple(opening.token_ids), rows, opening.num_prompt_tokens, now_s)


class _Kept:
    """Examples up to a number of tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._examples: deque[Example] = deque()

    def add(self, example: Example, at_random: random.Random | None = None) -> list[Example]:
        """Returns what had to go: the oldest, or whatever chance takes."""
        if at_random is not None and self._examples and self._is_full:
            self._examples.rotate(at_random.randrange(len(self._examples)))
        self._examples.append(example)
        self.num_tokens += len(example.token_ids)
        dropped = []
        while self._examples and self._is_full:
            dropped.append(self._drop())
        return dropped

    def drop_before(self, time_s: float) -> None:
        kept = [each for each in self._examples if each.arrived_s >= time_s]
        self.clear()
        for each in kept:
            self.add(each)

    def clear(self) -> None:
        self._examples.clear()
        self.num_tokens = 0

    def all(self) -> list[Example]:
        return list(self._examples)

    @property
    def _is_full(self) -> bool:
        return self.num_tokens > self._max_tokens

    def _drop(self) -> Example:
        dropped = self._examples.popleft()
        self.num_tokens -= len(dropped.token_ids)
        return dropped


def _is_held_out(example: Example, share: float) -> bool:
    """By the prompt, so that what is asked again falls on the same side."""
    num_tokens = max(example.num_prompt_tokens, _FEWEST_PROMPT_TOKENS)
    return _number(example.token_ids[:num_tokens]) < share * _SPLITS


def _number(token_ids: Sequence[int]) -> int:
    return zlib.crc32(array("q", token_ids).tobytes()) % _SPLITS
