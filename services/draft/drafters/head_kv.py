"""KV bookkeeping of one sequence in a draft head.

The *row* of position p reads the token after p and the target's features of p, so N committed
tokens make N - 1 rows. *Index* counts rows from the sequence's window, as in `draft_kv`; committed
rows take the indices `[0, num_computed)`, the rows of a growing tree follow them as its tail. Tree
rows are computed from the head's own states, not from features, so none of them is kept: once a
verdict commits their tokens, they are computed again.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Sequence

from services.draft.drafters.branch_pages import BranchKv, BranchPages
from services.draft.drafters.draft_kv import SequenceKv
from services.draft.sequence import DraftSequence
from shared.kv.leases import KvLeases

_TOKEN_BITS = 32
_DIGEST_BYTES = 16


class HeadKv:
    """Opens, slides and closes the KV of sequences over one page pool.

    A sequence that outgrows the head's context starts over with the younger half of it, if the
    features of that half are still there.
    """

    def __init__(self, leases: KvLeases, *, max_context_tokens: int, margin_tokens: int) -> None:
        """`margin_tokens` of the context stay free for the tree."""
        assert max_context_tokens > margin_tokens + 1, "no room for a context beside the tree"
        self.leases = leases
        self._max_window_rows = max_context_tokens - margin_tokens
        self._branches = BranchPages(leases, max_context_tokens=max_context_tokens)

    @property
    def num_kept_rows(self) -> int:
        """Rows a window starts over with."""
        return max(self._max_window_rows // 2, 1)

    def open(self, sequence: DraftSequence) -> SequenceKv:
        """Starts a sequence on the longest cached prefix of its window."""
        num_rows = sequence.num_tokens - 1
        is_long = num_rows > self._max_window_rows
        return self._open_at(sequence, num_rows - self.num_kept_rows if is_long else 0)

    def restart(self, kv: SequenceKv, sequence: DraftSequence, window_start: int) -> SequenceKv:
        """Gives the window up for one that starts at the row of position `window_start`."""
        self.close(kv, sequence)
        return self._open_at(sequence, window_start)

    def is_outgrown(self, kv: SequenceKv, sequence: DraftSequence) -> bool:
        return num_window_rows(kv, sequence) > self._max_window_rows

    def reserve(self, kv: SequenceKv, sequence: DraftSequence, num_tail_rows: int) -> bool:
        """Whether the window and a tree of that many rows fit; nothing changed if not."""
        return self.leases.try_grow(kv.lease, num_window_rows(kv, sequence) + num_tail_rows)

    def branch(self, kv: SequenceKv, path: Sequence[int], num_rows: int) -> BranchKv | None:
        """Returns pages for a row and a tree behind a path of tree rows, see `BranchPages`."""
        pages = kv.lease.pages
        return self._branches.branch(kv.lease, pages, kv.num_computed, path, num_rows)

    def take_moves(self) -> list[tuple[int, int]]:
        """See `BranchPages.take_moves`."""
        return self._branches.take_moves()

    def publish(self, kv: SequenceKv, sequence: DraftSequence) -> None:
        """Shares the computed rows with other sequences, once."""
        if not kv.is_published:
            kv.is_published = True
            self.leases.publish(kv.lease, _row_keys(sequence, kv.window_start, kv.num_computed))

    def close(self, kv: SequenceKv, sequence: DraftSequence) -> None:
        self.leases.close(kv.lease, _row_keys(sequence, kv.window_start, kv.num_computed))

    def _open_at(self, sequence: DraftSequence, window_start: int) -> SequenceKv:
        num_rows = max(sequence.num_tokens - 1 - window_start, 0)
        keys = _row_keys(sequence, window_start, num_rows)
        lease = self.leases.open(keys, sequence.cache_salt)
        return SequenceKv(lease, window_start, lease.num_cached_tokens)


def num_window_rows(kv: SequenceKv, sequence: DraftSequence) -> int:
    """Returns the committed rows from the window's start on, computed or not."""
    return max(sequence.num_tokens - 1 - kv.window_start, 0)


def _row_keys(sequence: DraftSequence, window_start: int, count: int) -> list[int]:
    """Returns what the prefix cache knows each row by.

    A row depends on its own token, through the features, and on the one after it, so a key holds
    both. Features depend on every earlier token, too: the first row of a window that starts in the
    middle is known by a digest of all of them. The features of a probe are its caller's, so its
    rows are not for others and the other way round: they have no keys.
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
