"""Takes committed tokens into a draft head's cache from the target's features of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.kv.upload import uploaded_numbers
from shared.models.heads.head import DraftHead

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


class HeadCatchUp:
    """Computes rows of one head, those of all sequences together.

    Args:
        pool: the head's.
        feature_rows: `[num_slots, W]`, the features of the token in each slot of the target's pool.
    """

    def __init__(self, head: DraftHead, pool: KvPool, feature_rows: Tensor) -> None:
        self._head = head
        self._pool = pool
        self._feature_rows = feature_rows

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
        features = self._feature_rows.index_select(0, uploaded_numbers(feature_slots, device))
        self._head.forward(batch, self._head.fuse(features), self._pool)

    def _slots(self, pages: Sequence[int], positions: range) -> list[int]:
        size = self._pool.page_size
        return [pages[position // size] * size + position % size for position in positions]


def _rows(backlog: HeadBacklog, first: int, count: int) -> SequenceRows:
    return SequenceRows.causal(
        backlog.token_ids[first + 1 : first + 1 + count], first, backlog.head_pages
    )
