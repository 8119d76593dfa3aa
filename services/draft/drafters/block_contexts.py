"""The context of block drafters: the target's features of each sequence as keys and values in
pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from services.draft.drafters.feature_buffer import FeatureBuffer
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.leases import OutOfPages, PagePool
from shared.runtime.head_runner import BlockRunner
from shared.runtime.joined_rows import joined_rows


@dataclass(slots=True, eq=False)
class ContextPages:
    """Keys and values of the positions `[start, end)`, from the beginning of `pages` on.

    A position's keys and values are made of its own features alone and stand at its own rotary
    angle, so a window slides by letting go of its first pages; nothing is computed again.

    Attributes:
        start: the first position that is kept.
        end: the position after the last that is computed.
    """

    page_size: int
    start: int = 0
    end: int = 0
    pages: list[int] = field(default_factory=list)

    def index(self, position: int) -> int:
        """Returns the logical KV index of a position."""
        return position - self.start

    def slots(self, positions: Sequence[int]) -> list[int]:
        size = self.page_size
        indices = [self.index(position) for position in positions]
        return [self.pages[index // size] * size + index % size for index in indices]

    def grow(self, pool: PagePool, end: int) -> None:
        """Makes room for the positions below `end`.

        Raises:
            OutOfPages: there are not enough pages; nothing changed.
        """
        num_missing = -(-self.index(end) // self.page_size) - len(self.pages)
        if num_missing > 0:
            self.pages += pool.allocate(num_missing)

    def trim(self, pool: PagePool, end: int) -> None:
        """Lets go of the pages that hold nothing but positions from `end` on."""
        num_kept = max(-(-self.index(end) // self.page_size), 0)
        pool.release(self.pages[num_kept:])
        del self.pages[num_kept:]

    def slide(self, pool: PagePool, start: int) -> None:
        """Lets whole pages before position `start` go, or all of them if none reaches it."""
        if start >= self.end:
            self.restart(pool, max(start, self.end))
            return
        num_dropped = max(self.index(start) // self.page_size, 0)
        pool.release(self.pages[:num_dropped])
        del self.pages[:num_dropped]
        self.start += num_dropped * self.page_size

    def restart(self, pool: PagePool, start: int) -> None:
        """Lets everything go and begins at `start`."""
        pool.release(self.pages)
        self.pages = []
        self.start = self.end = start


class BlockRows:
    """Lays out rows from the last committed token's position on.

    A *known* row is a token whose features are not here: the last committed one, and those that a
    verdict may commit. It sees the context, its ancestors and itself. A *block* opens with one that
    is known as well; it and the masks behind it all see each other and the known rows above them.

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


@dataclass(slots=True, eq=False)
class _Context:
    """The computed rows of a sequence and the features for the rows to come."""

    pages: ContextPages
    features: FeatureBuffer = field(default_factory=FeatureBuffer)


class BlockContexts:
    """Opens, fills, slides and closes the contexts of sequences, and runs blocks behind them.

    Args:
        num_pages: of the runner's pool, the padding page included.
        window_tokens: positions before a block that it sees, to the page.
    """

    def __init__(self, runner: BlockRunner, num_pages: int, *, window_tokens: int) -> None:
        self._runner = runner
        self._pool = PagePool(num_pages)
        self._window_tokens = window_tokens
        self._contexts: dict[SequenceKey, _Context] = {}

    def open(self, sequence: DraftSequence) -> None:
        self._contexts[sequence.key] = _Context(ContextPages(self._runner.page_size))
        self.slide(sequence)

    def close(self, sequence: DraftSequence) -> None:
        self._pool.release(self._contexts.pop(sequence.key).pages.pages)

    def pages_of(self, sequence: DraftSequence) -> ContextPages:
        """Returns where the context of a sequence lies."""
        return self._contexts[sequence.key].pages

    def slide(self, sequence: DraftSequence) -> None:
        """Lets go of positions that no block will see; they need not even be computed."""
        context = self._contexts[sequence.key]
        start = sequence.num_tokens - 1 - self._window_tokens
        if start > context.pages.start:
            context.pages.slide(self._pool, start)
            context.features.drop_before(context.pages.end)

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        context = self._contexts[sequence.key]
        context.features.append(rows)
        if context.features.start > context.pages.end:
            # The target cannot send what came before, so that is no part of the context.
            context.pages.restart(self._pool, context.features.start)
        context.features.drop_before(context.pages.end)

    def backlog(self, sequence: DraftSequence) -> int:
        """Returns the committed positions that are not computed but whose features are here."""
        context = self._contexts[sequence.key]
        end = min(context.features.end, sequence.num_tokens - 1)
        return max(end - context.pages.end, 0)

    def is_complete(self, sequence: DraftSequence) -> bool:
        """Whether the features of every committed position but the last are here."""
        pages, end = self._contexts[sequence.key].pages, sequence.num_tokens - 1
        return pages.start < end == pages.end + self.backlog(sequence)

    def reserve(self, sequence: DraftSequence, num_rows: int) -> bool:
        """Makes room for that many rows behind the context, the last committed token's included;
        False, with nothing changed, if there is none."""
        end = sequence.num_tokens - 1 + num_rows
        try:
            self._contexts[sequence.key].pages.grow(self._pool, end)
        except OutOfPages:
            return False
        return True

    def trim(self, sequence: DraftSequence, num_rows: int) -> None:
        """Frees the pages reserved beyond that many rows behind the context."""
        end = sequence.num_tokens - 1 + num_rows
        self._contexts[sequence.key].pages.trim(self._pool, end)

    def take_in(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        """Turns the features of the next positions of each sequence into keys and values."""
        pieces, positions, slots = list[Tensor](), list[int](), list[int]()
        for sequence, count in counts:
            context = self._contexts[sequence.key]
            new = range(context.pages.end, context.pages.end + count)
            if count:
                pieces += context.features.read(new.start, count)
            positions += new
            slots += context.pages.slots(new)
            context.pages.end = new.stop
            context.features.drop_before(new.stop)
        if pieces:
            self._runner.write_context(joined_rows(pieces, self._runner.device), positions, slots)

    def run(self, rows: Sequence[SequenceRows]) -> Tensor:
        """Returns the logits `[L, V]` of the rows that ask for them."""
        runner = self._runner
        return runner.run(build_batch(rows, page_size=runner.page_size, device=runner.device))

    def gauges(self) -> Mapping[str, float]:
        """See `Drafter.gauges`."""
        buffers = [context.features for context in self._contexts.values()]
        return {
            "page_count": float(self._pool.num_pages),
            "free_page_count": float(self._pool.num_free),
            "held_page_count": float(self._pool.num_pages - self._pool.num_free),
            "held_feature_row_count": float(sum(each.end - each.start for each in buffers)),
        }

    def check(self) -> None:
        """Asserts that every page has one owner."""
        held = [page for context in self._contexts.values() for page in context.pages.pages]
        assert len(set(held)) == len(held), "a page has two owners"
        assert len(held) + self._pool.num_free == self._pool.num_pages, "a page has no owner"
