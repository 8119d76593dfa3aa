"""The head in rounds on the device: the trees that it grows, and the rows that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.kv.upload import uploaded_numbers
from shared.models.heads.feature_spec import FeatureSpec
from shared.models.heads.head import DraftHead
from shared.runtime.round_batches import RoundBatches, RoundShape, RoundTree
from shared.runtime.round_parts import RoundParts
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import RoundState

_CHUNK_ROWS = 2048


@dataclass(frozen=True, slots=True)
class HeadBacklog:
    """Rows that one sequence lacks in the head's cache.

    Attributes:
        token_ids: committed; the row of position p reads the token after it.
        start: the first row that is missing.
        end: the row behind the last one that is caught up with: a round computes the open ones.
        pages: the target's, where the features are.
        head_pages: the head's.
    """

    token_ids: Sequence[int]
    start: int
    end: int
    pages: Sequence[int]
    head_pages: Sequence[int]

    @property
    def num_rows(self) -> int:
        return max(self.end - self.start, 0)


class HeadCatchUp:
    """Computes rows of one head, those of all sequences together.

    Args:
        pool: the head's.
        features: returns the rows `[N, W]` at slots `[N]` of the target's pool.
    """

    def __init__(self, head: DraftHead, pool: KvPool, features: Callable[[Tensor], Tensor]) -> None:
        self._head = head
        self._pool = pool
        self._features = features

    @torch.inference_mode()
    def run(self, backlogs: Iterable[HeadBacklog]) -> None:
        """Computes what is missing, in forwards of bounded size."""
        chunk: list[SequenceRows] = []
        feature_slots: list[int] = []
        for backlog in backlogs:
            first, end = backlog.start, backlog.end
            while first < end:
                count = min(end - first, _CHUNK_ROWS - len(feature_slots))
                chunk.append(_rows(backlog, first, count))
                feature_slots += self._slots(backlog.pages, range(first, first + count))
                first += count
                # Rows of a sequence read those before them from the cache: never in one forward.
                if len(feature_slots) == _CHUNK_ROWS:
                    self._forward(chunk, feature_slots)
                    chunk, feature_slots = [], []
        if chunk:
            self._forward(chunk, feature_slots)

    def _forward(self, chunk: Sequence[SequenceRows], feature_slots: Sequence[int]) -> None:
        device = self._pool.device
        batch = build_batch(chunk, page_size=self._pool.page_size, device=device)
        features = self._features(uploaded_numbers(feature_slots, device))
        self._head.forward(batch, self._head.fuse(features), self._pool)

    def _slots(self, pages: Sequence[int], positions: range) -> list[int]:
        size = self._pool.page_size
        return [pages[position // size] * size + position % size for position in positions]


def _rows(backlog: HeadBacklog, first: int, count: int) -> SequenceRows:
    return SequenceRows.causal(
        backlog.token_ids[first + 1 : first + 1 + count], first, backlog.head_pages
    )


class RoundHead(Protocol):
    """The head in rounds of one shape. It is in this process, or in another one.

    Attributes:
        state: of the lanes.
        feature_spec: the hidden states that it reads.
    """

    @property
    def state(self) -> RoundState: ...
    @property
    def feature_spec(self) -> FeatureSpec: ...

    def prepare(self, num_slots: int, sampling: RoundSampling) -> None:
        """Makes what rounds of a size need once, such as graphs."""

    def catch_up(self, backlogs: Iterable[HeadBacklog]) -> None:
        """Computes rows before the trees of the next round grow."""

    def begin(self, num_slots: int, sampling: RoundSampling) -> None:
        """A round is queued next on the current stream."""

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        """Returns a tree for each slot; may be captured in a graph."""

    @property
    def is_late(self) -> bool:
        """Whether trees did not come in time, so that rows are missing in the head's cache."""


class HeadPlace(Protocol):
    """A head that rounds can have: its weights and pages are in this process, or in another one.

    Attributes:
        vocab_size: tokens that it can propose.
    """

    @property
    def vocab_size(self) -> int: ...

    def in_rounds(
        self, number: int, shape: RoundShape, max_sequences: int, feature_rows: Tensor,
        target: KvPool,
    ) -> RoundHead:  # fmt: skip
        """Returns the head in rounds of a shape.

        Args:
            number: of the shape, from 0.
            feature_rows: `[num_slots, W]`, the features of the token in each slot of the target's
                pool.
            target: its pool.
        """

    def parts(self, shape: RoundShape, device: torch.device) -> RoundParts:
        """Returns the code that runs rounds of a shape."""

    def warmed_up(self) -> None:
        """Rounds of all shapes have run."""

    def forgive(self) -> None:
        """Sequences join rounds anew: trees that were late do not count any more."""

    def close(self) -> None:
        """Its draft has left."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnHead:
    """A head of this process.

    Attributes:
        pool: its KV, with pages as large as the target's.
        code: what drafts and verifies; None takes what suits head and device.
    """

    head: DraftHead
    pool: KvPool
    code: RoundParts | None = None

    @property
    def vocab_size(self) -> int:
        return self.head.vocabulary.size

    def parts(self, shape: RoundShape, device: torch.device) -> RoundParts:
        """See `HeadPlace.parts`."""
        return self.code or RoundParts.of(self.head, shape, device)

    def warmed_up(self) -> None:
        """Nothing is late in one process."""

    def forgive(self) -> None:
        """Nothing is late in one process."""

    def close(self) -> None:
        """It stays as it is."""

    def in_rounds(
        self, number: int, shape: RoundShape, max_sequences: int, feature_rows: Tensor,
        target: KvPool,
    ) -> RoundHead:  # fmt: skip
        """See `HeadPlace.in_rounds`."""
        assert target.page_size == self.pool.page_size, "pages differ in size"
        return _OwnRounds(self, shape, max_sequences, feature_rows)


class _OwnRounds:
    """See `RoundHead`."""

    def __init__(
        self, own: OwnHead, shape: RoundShape, max_sequences: int, feature_rows: Tensor
    ) -> None:
        head, pool = own.head, own.pool
        self.feature_spec = head.feature_spec
        self.state = RoundState.empty(
            max_sequences,
            max_open_rows=shape.max_committed,
            num_pages=shape.num_pages(pool.page_size),
            device=feature_rows.device,
        )
        batches = RoundBatches(shape, pool.page_size)
        draft = own.parts(shape, feature_rows.device).draft(head, pool, batches, feature_rows)
        self.grow = draft.grow
        self.catch_up = HeadCatchUp(head, pool, lambda slots: feature_rows[slots]).run
        self.is_late = False

    def prepare(self, num_slots: int, sampling: RoundSampling) -> None:
        """The graphs of the rounds have it in them."""

    def begin(self, num_slots: int, sampling: RoundSampling) -> None:
        """It runs on the same stream."""
