"""The committed rows of sequences in a draft head, computed from the target's features."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from services.draft.drafters.contexts import CONTEXT_MARGIN, Contexts
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import build_batch
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.runtime.host_copy import joined_rows
from shared.runtime.tree_model import HeadModel


class FeatureBuffer:
    """Feature rows that a head still needs: positions `[start, end)` of a sequence, in pieces.

    Attributes:
        end: the position after the last row that ever arrived.
    """

    __slots__ = ("_pieces", "end")

    def __init__(self) -> None:
        # Start position, end position and rows of each piece: reading a tensor's length is slow.
        self._pieces: deque[tuple[int, int, Tensor]] = deque()
        self.end = 0

    @property
    def start(self) -> int:
        """The first position held; `end` when none is."""
        return self._pieces[0][0] if self._pieces else self.end

    def append(self, rows: FeatureRows) -> None:
        """Appends rows; rows that arrived before are ignored. A gap drops all earlier rows, because
        a head cannot skip a position."""
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
        """Yields the rows of `[start, start + count)`, piece by piece; all must be here."""
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
    """Contexts whose row of position p reads the target's features of p. So N committed tokens have
    N - 1 rows, which wait for their features."""

    token_offset = 1
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
        """Adds rows; True when there was a gap before them, so that the context starts over."""
        features = self._features[sequence.key]
        features.append(rows)
        has_gap = features.start > self._next_position(sequence)
        if has_gap:
            # The target cannot send the rows before the gap again.
            self._restart(sequence, features.start)
        self.drop_features(sequence)
        return has_gap

    def backlog(self, sequence: DraftSequence) -> int:
        """Returns the number of committed rows not computed whose features are here."""
        end = min(self._features[sequence.key].end, sequence.num_tokens - 1)
        return max(end - self._next_position(sequence), 0)

    def is_complete(self, sequence: DraftSequence) -> bool:
        """Whether there are committed rows, and the features of all rows not computed are here."""
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
        """Frees the features of computed rows."""
        self._features[sequence.key].drop_before(self._next_position(sequence))

    def gauges(self) -> Mapping[str, float]:
        num_held = sum(buffer.end - buffer.start for buffer in self._features.values())
        return {**super().gauges(), "held_feature_row_count": float(num_held)}

    def _next_position(self, sequence: DraftSequence) -> int:
        """Returns the first position whose row is not computed."""
        kv = self.kv_of(sequence)
        return kv.window_start + kv.num_computed


_TOKEN_BITS = 32
_DIGEST_BYTES = 16


class HeadContexts(FeatureContexts):
    """Contexts of a head whose rows also read the token after their position. Tree rows are
    computed from the head's own states, not from features, so they are not kept: once a verdict
    commits their tokens, their rows are computed again.

    A sequence that outgrows the context starts over only as far back as it has features.

    Args:
        keeps_features: keep the features that a new window starts with; needed where the target's
            context is longer than the draft's.
        min_rows: least committed rows that a tree needs.
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
        """Starts over with the younger half of an outgrown context, as far back as there are
        features; returns whether the context was outgrown."""
        is_outgrown = self.num_window_rows(sequence) > self.max_rows
        if is_outgrown:
            start = sequence.num_tokens - 1 - self.num_kept_rows
            self._restart(sequence, max(start, self._features[sequence.key].start))
        return is_outgrown

    def is_complete(self, sequence: DraftSequence) -> bool:
        """Also requires a row that is not computed, and enough rows for a tree."""
        is_due = self.backlog(sequence) > 0 and super().is_complete(sequence)
        return is_due and self.num_window_rows(sequence) >= self._min_rows

    @torch.inference_mode()
    def compute_rows(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        hidden, pool = self.hidden(counts), self._pool
        rows = [self._next_rows(sequence, count) for sequence, count in counts]
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

    def drop_features(self, sequence: DraftSequence) -> None:
        """Frees the features that neither the next rows nor a later window needs."""
        needed = self._next_position(sequence)
        if self._keeps_features:
            needed = min(needed, sequence.num_tokens - 1 - self.num_kept_rows)
        self._features[sequence.key].drop_before(needed)

    def _cache_keys(self, sequence: DraftSequence, window_start: int, count: int) -> Sequence[int]:
        """A row depends on its own token, through the features, and on the token after it, so a key
        holds both. Features depend on every earlier token, too: where a window starts in the middle
        of a sequence, the key of its first row is a digest of all of them. The features of a probe
        come from its caller, so a probe shares no rows and has no keys.
        """
        if sequence.is_probe:
            return []
        tokens = sequence.token_ids[window_start : window_start + count + 1]
        keys = [
            token << _TOKEN_BITS | next_token for token, next_token in itertools.pairwise(tokens)
        ]
        if keys and window_start:
            before = array("q", sequence.token_ids[: window_start + 2]).tobytes()
            digest = hashlib.blake2b(before, digest_size=_DIGEST_BYTES).digest()
            keys[0] = int.from_bytes(digest, "little")
        return keys
