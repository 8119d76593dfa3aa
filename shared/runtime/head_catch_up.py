"""Takes committed tokens into a draft head's cache from the target's features of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.kv.upload import uploaded_numbers
from shared.models.heads.head import DraftHead

_CHUNK_ROWS = 2048


class HeadCatchUp:
    """Computes rows of one head, one sequence at a time.

    Args:
        pool: the head's.
        feature_rows: `[num_slots, W]`, the features of the token in each slot of the target's pool.
    """

    def __init__(self, head: DraftHead, pool: KvPool, feature_rows: Tensor) -> None:
        self._head = head
        self._pool = pool
        self._feature_rows = feature_rows

    @torch.inference_mode()
    def run(
        self,
        token_ids: Sequence[int],
        start: int,
        *,
        pages: Sequence[int],
        head_pages: Sequence[int],
    ) -> None:
        """Computes the rows from `start` on, all but the last, which a tree starts from.

        Args:
            token_ids: committed; the row of position p reads the token after it.
            pages: the target's, where the features are.
        """
        end = len(token_ids) - 2
        for first in range(start, end, _CHUNK_ROWS):
            count = min(end - first, _CHUNK_ROWS)
            rows = SequenceRows(
                token_ids=token_ids[first + 1 : first + 1 + count],
                positions=range(first, first + count),
                kv_start=first,
                pages=head_pages,
                prefix_length=first,
                tail_mask=None,
                logit_rows=(),
            )
            batch = build_batch([rows], page_size=self._pool.page_size, device=self._pool.device)
            self._head.forward(batch, self._hidden(pages, range(first, first + count)), self._pool)

    def _hidden(self, pages: Sequence[int], positions: range) -> Tensor:
        """Returns the hidden states that the rows of some positions read."""
        size = self._pool.page_size
        slots = [pages[position // size] * size + position % size for position in positions]
        index = uploaded_numbers(slots, self._feature_rows.device)
        return self._head.fuse(self._feature_rows.index_select(0, index))
