"""The rows of one sequence's blocks in a forward: known tokens, and blocks that hang off them.

A *known* row is a token whose features are not here: the last committed one, and those that a
verdict may commit. It sees the context, its ancestors and itself. A *block* opens with one that is
known as well; it and the masks behind it all see each other and the known rows above them.
"""

from __future__ import annotations

import numpy as np

from services.draft.drafters.context_pages import ContextPages
from shared.kv.batch import SequenceRows


class BlockRows:
    """Lays out rows from the last committed token's position on.

    Args:
        context: of the sequence; it ends right before the last committed token.
        block_size: rows of a block.
        mask_token_id: stands for a token that is to be drafted.
    """

    def __init__(self, context: ContextPages, *, block_size: int, mask_token_id: int) -> None:
        self._context = context
        self._block_size = block_size
        self._mask_token_id = mask_token_id
        self._tokens: list[int] = []
        self._depths: list[int] = []
        self._visible: list[list[int]] = []
        self._wanted: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def add_known(self, above: int | None, token: int) -> int:
        """Appends a known token; returns its row.

        Args:
            above: row of the token before it; None for the last committed token.
        """
        row = len(self)
        self._tokens.append(token)
        self._depths.append(self._depth_below(above))
        self._visible.append([*self._path_to(above), row])
        return row

    def add_block(self, above: int | None, token: int, num_wanted: int) -> None:
        """Appends a block.

        Args:
            above: row of the token before the block; None where it opens with the last committed
                token.
            token: opens the block.
            num_wanted: drafted positions that are to be scored.
        """
        first, size = len(self), self._block_size
        depth, above_it = self._depth_below(above), self._path_to(above)
        self._tokens += [token, *[self._mask_token_id] * (size - 1)]
        self._depths += range(depth, depth + size)
        self._visible += [[*above_it, *range(first, first + size)]] * size
        self._wanted += range(first + 1, first + 1 + num_wanted)

    def lay_out(self) -> SequenceRows:
        """Returns the rows; their pages must reach as far."""
        end, num_rows = self._context.end, len(self)
        mask = np.zeros((num_rows, num_rows), dtype=np.bool_)
        for row, visible in enumerate(self._visible):
            mask[row, visible] = True
        return SequenceRows(
            token_ids=self._tokens,
            positions=[end + depth for depth in self._depths],
            kv_start=self._context.index(end),
            pages=self._context.pages,
            prefix_length=self._context.index(end),
            tail_mask=mask,
            logit_rows=self._wanted,
        )

    def _depth_below(self, above: int | None) -> int:
        return 0 if above is None else self._depths[above] + 1

    def _path_to(self, above: int | None) -> list[int]:
        return [] if above is None else self._visible[above]
