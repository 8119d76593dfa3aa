"""The traffic that a learner trains on: sequences of targets become examples, of which some are
held out and old ones are dropped."""

from __future__ import annotations

import itertools
import random
import threading
import time
import zlib
from array import array
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from torch import Tensor

from services.draft.engine import Deliver
from services.draft.events import (
    Event,
    FeaturesArrived,
    LinkClosed,
    LinkTerms,
    SequencesOpened,
    WeightsUpdated,
)
from shared.tokens import OpenedSequence

_NUM_BUCKETS = 1000
_MIN_SPLIT_TOKENS = 16
"""First tokens of a recorded text that select its split, because its prompt length is unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A sequence that has ended.

    Attributes:
        token_ids: N tokens, prompt first.
        rows: `[N - 1, W]`, the features of all tokens but the last.
        num_prompt_tokens: tokens that are not drafted.
        arrived_s: arrival time, by the clock of the traffic.
    """

    token_ids: tuple[int, ...]
    rows: Tensor
    num_prompt_tokens: int
    arrived_s: float = 0.0

    @property
    def num_drafted(self) -> int:
        """Number of tokens that a draft could have proposed. The first output token is none of
        them: the row before it has no state yet."""
        return len(self.token_ids) - max(self.num_prompt_tokens + 1, 2)


class Traffic:
    """Receives the events of targets, in place of a draft engine, and keeps examples in memory.
    Written by one thread, read by another.

    Args:
        max_tokens: most tokens of all examples; the oldest examples are dropped first.
        max_age_s: greatest age of an example; None is no limit.
        held_out_share: share of the traffic, by prompt, that is never trained on.
        replay_share: share of `max_tokens` for a sample of all traffic since start-up.

    Attributes:
        num_examples, num_tokens: examples and their tokens since start-up.
        num_forgotten: how often all examples were dropped.
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
        self._lock = threading.Lock()
        self._link_numbers = itertools.count(1)
        self._links: set[int] = set()
        self._open: dict[tuple[int, int], _OpenSequence] = {}
        replayed = round(max_tokens * replay_share)
        held_out = round((max_tokens - replayed) * held_out_share)
        count = itertools.count().__next__
        self._held_out = _Examples(held_out, count)
        self._recent = _Examples(max_tokens - replayed - held_out, count)
        self._replay = _Examples(replayed, random.Random(0).random)

    # The interface of a draft engine, for links.

    def open_link(self, terms: LinkTerms, deliver: Deliver) -> int:
        """Adds a target that accepted the learner; nothing is ever delivered to it."""
        del terms, deliver
        with self._lock:
            link = next(self._link_numbers)
            self._links.add(link)
            return link

    def close_link(self, link: int) -> None:
        """Removes a target with its unfinished sequences."""
        self.submit(LinkClosed(link))

    def submit(self, event: Event) -> None:
        """Handles an event; events that only a draft needs are ignored."""
        if isinstance(event, WeightsUpdated):
            self.forget()
        with self._lock:
            match event:
                case SequencesOpened():
                    for opening in event.openings:
                        self._open[event.link, opening.sequence_id] = _OpenSequence(opening)
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

    # The interface for the learner.

    def add(self, example: Example, *, is_old: bool = False) -> None:
        """Adds a recorded sequence; an old one is only replayed."""
        with self._lock:
            if is_old:
                self._replay.add(example)
            else:
                self._keep(example)

    def recent(self) -> list[Example]:
        """Returns recent examples for training, oldest first."""
        return self._read(self._recent)

    def replayed(self) -> list[Example]:
        """Returns a sample of all training examples since start-up."""
        return self._read(self._replay)

    def held_out(self, *, since_s: float = 0.0) -> list[Example]:
        """Returns held-out examples that arrived at `since_s` or later."""
        examples = self._read(self._held_out)
        return [example for example in examples if example.arrived_s >= since_s]

    def kept(self) -> list[Example]:
        return [*self._read(self._replay), *self._read(self._recent), *self._read(self._held_out)]

    def forget(self) -> None:
        """Drops all examples, because the target's hidden states have changed their meaning."""
        with self._lock:
            self.num_forgotten += 1
            for kept in (self._recent, self._replay, self._held_out):
                kept.clear()
            self._open.clear()

    @property
    def num_links(self) -> int:
        """Number of attached targets."""
        return len(self._links)

    @property
    def num_kept_tokens(self) -> int:
        """Number of tokens in memory."""
        return sum(kept.num_tokens for kept in (self._recent, self._replay, self._held_out))

    def _read(self, kept: _Examples) -> list[Example]:
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
            self._replay.add(dropped)


@dataclass(slots=True)
class _OpenSequence:
    opening: OpenedSequence
    pieces: list[Tensor] = field(default_factory=list)

    def example(self, now_s: float) -> Example:
        opening = self.opening
        rows = torch.cat(self.pieces)[: len(opening.token_ids) - 1]
        return Example(tuple(opening.token_ids), rows, opening.num_prompt_tokens, now_s)


class _Examples:
    """Examples with at most `max_tokens` tokens together. The lowest priorities are dropped first.

    Args:
        next_priority: of an example that is added. Ascending numbers keep the latest examples.
            Random numbers keep a uniform sample of all that were ever added (reservoir sampling).
    """

    def __init__(self, max_tokens: int, next_priority: Callable[[], float]) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._next_priority = next_priority
        self._examples: list[tuple[float, Example]] = []  # by priority

    def add(self, example: Example) -> list[Example]:
        """Returns the examples that are dropped for it."""
        insort(self._examples, (self._next_priority(), example), key=itemgetter(0))
        self.num_tokens += len(example.token_ids)
        num_dropped = 0
        while self.num_tokens > self._max_tokens:
            self.num_tokens -= len(self._examples[num_dropped][1].token_ids)
            num_dropped += 1
        dropped = self._examples[:num_dropped]
        del self._examples[:num_dropped]
        return [example for _, example in dropped]

    def drop_before(self, time_s: float) -> None:
        self._examples = [entry for entry in self._examples if entry[1].arrived_s >= time_s]
        self.num_tokens = sum(len(example.token_ids) for _, example in self._examples)

    def clear(self) -> None:
        self._examples.clear()
        self.num_tokens = 0

    def all(self) -> list[Example]:
        return [example for _, example in self._examples]


def _is_held_out(example: Example, share: float) -> bool:
    """Splits by a hash of the prompt, so that a repeated prompt is on the same side."""
    num_tokens = max(example.num_prompt_tokens, _MIN_SPLIT_TOKENS)
    prompt = array("q", example.token_ids[:num_tokens])
    return zlib.crc32(prompt.tobytes()) % _NUM_BUCKETS < share * _NUM_BUCKETS
