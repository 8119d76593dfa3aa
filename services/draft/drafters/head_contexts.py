"""The committed rows of sequences in a draft head, computed from the target's features."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from services.draft.drafters.contexts import CONTEXT_MARGIN, BranchKv, Contexts
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import build_batch
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.runtime.host_copy import joined_rows
from shared.runtime.tree_model import HeadModel


class FeatureBuffer:
    """Feature rows that a head has not used up: those of the positions `[start, end)` of a
    sequence, in the pieces they came in.

    Attributes:
        end: the position after the last row that ever came.
    """

    __slots__ = ("_pieces", "end")

    def __init__(self) -> None:
        # With the positions that each begins and ends at: a tensor is slow to tell its length.
        self._pieces: deque[tuple[int, int, Tensor]] = deque()
        self.end = 0

    @property
    def start(self) -> int:
        """The first position held; `end` when none is."""
        return self._pieces[0][0] if self._pieces else self.end

    def append(self, rows: FeatureRows) -> None:
        """Takes rows in; those it has had already are left out. After a gap everything before it
        is dropped, because a head cannot step over a position."""
        start, piece = rows.position_offset, rows.rows
        end = start + piece.shape[0]
        if start > self.end:
            self._pieces.clear()
        elif start < self.end:
            start, piece = self.end, piece[self.end - start :]
        if end > start:
            self._pieces.append((start, end, piece))
        self.end = max(start, end)

    def drop_before(self, position: int) -> None:
        """Frees pieces that end at `position` or before it."""
        while self._pieces and self._pieces[0][1] <= position:
            self._pieces.popleft()

    def read(self, start: int, count: int) -> Iterator[Tensor]:
        """Yields the rows of `[start, start + count)`, piece by piece; all must be held."""
        end = start + count
        assert self.start <= start <= end <= self.end, "these rows are not here"
        for first, last, piece in self._pieces:
            if end <= first:
                return
            if start <= first and last <= end:
                yield piece
            elif start < last:
                yield piece[max(start - first, 0) : end - first]


class FeatureContexts(Contexts):
    """The row of position p reads the target's features of p, so N committed tokens make N - 1
    rows, which wait for their features."""

    reads_ahead = 1
    keeps_tree_rows = False

    def __init__(
        self, pool: KvPool, leases: KvLeases, *, max_context_tokens: int, margin_tokens: int
    ) -> None:
        super().__init__(
            pool, leases, max_context_tokens=max_context_tokens, margin_tokens=margin_tokens
        )
        self._features: dict[SequenceKey, FeatureBuffer] = {}

    def open(self, sequence: DraftSequence) -> None:
        self._features[sequence.key] = FeatureBuffer()
        super().open(sequence)

    def close(self, sequence: DraftSequence) -> None:
        super().close(sequence)
        del self._features[sequence.key]

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> bool:
        """Takes rows in; True when the context had to start over at the first of them."""
        features = self._features[sequence.key]
        features.append(rows)
        has_gap = features.start > self._next_position(sequence)
        if has_gap:
            # The target cannot send what came before, so that is no part of the context.
            self._restart(sequence, features.start)
        self.drop_features(sequence)
        return has_gap

    def backlog(self, sequence: DraftSequence) -> int:
        """Returns the committed rows that are not computed but whose features are here."""
        end = min(self._features[sequence.key].end, sequence.num_tokens - 1)
        return max(end - self._next_position(sequence), 0)

    def is_complete(self, sequence: DraftSequence) -> bool:
        """Whether there are committed rows, and the features of all that are not computed."""
        num_rows = self.num_window_rows(sequence)
        return 0 < num_rows == self.kv_of(sequence).num_computed + self.backlog(sequence)

    def sources(self, counts: Sequence[tuple[DraftSequence, int]]) -> list[Tensor]:
        """Returns the features `[any, W]` of the next rows of each sequence, piece by piece."""
        return [
            piece
            for sequence, count in counts
            for piece in self._features[sequence.key].read(self._next_position(sequence), count)
        ]

    def drop_features(self, sequence: DraftSequence) -> None:
        """Frees the features that are needed no more."""
        self._features[sequence.key].drop_before(self._next_position(sequence))

    def gauges(self) -> Mapping[str, float]:
        num_held = sum(each.end - each.start for each in self._features.values())
        return {**super().gauges(), "held_feature_row_count": float(num_held)}

    def _next_position(self, sequence: DraftSequence) -> int:
        """Returns the first position whose row is not computed."""
        kv = self.kv_of(sequence)
        return kv.window_start + kv.num_computed


_TOKEN_BITS = 32
_DIGEST_BYTES = 16


class HeadContexts(FeatureContexts):
    """Each row reads the token after its position as well. Tree rows are computed from the head's
    own states, not from features, so none of them is kept: once a verdict commits their tokens,
    they are computed again.

    A sequence that outgrows the context starts over only as far back as its features are still
    there.

    Args:
        keeps_features: hold on to the features a sliding window starts over with; needed where
            the target's context is longer than the draft's.
        min_rows: committed rows that a tree needs.
    """

    def __init__(
        self,
        model: HeadModel,
        leases: KvLeases,
        *,
        max_context_tokens: int,
        keeps_features: bool,
        min_rows: int,
    ) -> None:
        super().__init__(
            model.pool,
            leases,
            max_context_tokens=max_context_tokens,
            margin_tokens=CONTEXT_MARGIN,
        )
        self._head = model.head
        self._keeps_features = keeps_features
        self._min_rows = min_rows

    def slide(self, sequence: DraftSequence) -> bool:
        """Starts over with the younger half of a context that is outgrown, as far back as there
        are features; returns whether it was."""
        is_outgrown = self._is_outgrown(sequence)
        if is_outgrown:
            start = sequence.num_tokens - 1 - self.num_kept_rows
            self._restart(sequence, max(start, self._features[sequence.key].start))
        return is_outgrown

    def is_complete(self, sequence: DraftSequence) -> bool:
        """Whether besides some rows are not computed, and there are enough for a tree."""
        is_due = self.backlog(sequence) > 0 and super().is_complete(sequence)
        return is_due and self.num_window_rows(sequence) >= self._min_rows

    @torch.inference_mode()
    def take_in(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        hidden, pool = self.hidden(counts), self._pool
        rows = [self._next_rows(*each) for each in counts]
        batch = build_batch(rows, page_size=pool.page_size, device=pool.device)
        self._head.forward(batch, hidden, pool)
        for sequence, _ in counts:
            self.drop_features(sequence)

    def hidden(self, counts: Sequence[tuple[DraftSequence, int]]) -> Tensor:
        """Returns the fused features of the next rows of each sequence, end to end."""
        return self._head.fuse(joined_rows(self.sources(counts), self._pool.device))

    def settle(self, sequence: DraftSequence) -> None:
        super().settle(sequence)
        self.drop_features(sequence)

    def branch(
        self, sequence: DraftSequence, behind: BranchKv | None, path: Sequence[int], num_rows: int
    ) -> BranchKv | None:
        assert behind is None, "a head goes on from features, never from a branch"
        return super().branch(sequence, behind, path, num_rows)

    def drop_features(self, sequence: DraftSequence) -> None:
        """Frees the features that neither the next rows nor a window to come needs."""
        needed = self._next_position(sequence)
        if self._keeps_features:
            needed = min(needed, sequence.num_tokens - 1 - self.num_kept_rows)
        self._features[sequence.key].drop_before(needed)

    def _keys(self, sequence: DraftSequence, window_start: int, count: int) -> Sequence[int]:
        """A row depends on its own token, through the features, and on the one after it, so a key
        holds both. Features depend on every earlier token, too: the first row of a window that
        starts in the middle is known by a digest of all of them. The features of a probe are its
        caller's, so its rows are not for others and the other way round: they have no keys.
        """
        if sequence.is_probe:
            return []
        tokens = sequence.token_ids[window_start : window_start + count + 1]
        keys = [a << _TOKEN_BITS | b for a, b in itertools.pairwise(tokens)]
        if keys and window_start:
            before = array("q", sequence.token_ids[: window_start + 2]).tobytes()
            digest = hashlib.blake2b(before, digest_size=_DIGEST_BYTES).digest()
            keys[0] = int.from_bytes(digest, "little")
        return keys
