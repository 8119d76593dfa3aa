"""The context of block drafters: the target's features of each sequence as keys and values in
pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from services.draft.drafters.context_pages import ContextPages
from services.draft.drafters.feature_buffer import FeatureBuffer
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pages import OutOfPages, PagePool
from shared.runtime.block_runner import BlockRunner
from shared.runtime.joined_rows import joined_rows


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
