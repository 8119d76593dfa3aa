"""Drafts a whole block in one forward, from the target's features: DFlash.

A round costs one forward for all sequences together, whatever the length of the block. Before it
the features that the last verdict brought become keys and values of their positions. Each row of
the block scores the token at its own position; the candidates are the best of each, a chain, or a
tree over the marginals when the shape has siblings (see `block_tree`).

Source: Chen et al., DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.draft.draft_scores import DraftScores
from services.draft.drafters.context_pages import ContextPages
from services.draft.drafters.drafter import DrafterLimits, Proposal
from services.draft.drafters.feature_buffer import FeatureBuffer
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pages import OutOfPages, PagePool
from shared.runtime.block_runner import BlockRunner
from shared.speculation.block_tree import grow_block_tree
from shared.speculation.topk import stable_topk
from shared.tokens import EMPTY_TREE, TreeShape, Verdict


@dataclass(slots=True, eq=False)
class _State:
    """What is computed of a sequence, and what there is to compute it from."""

    context: ContextPages
    features: FeatureBuffer = field(default_factory=FeatureBuffer)


class DflashDrafter:
    """See `Drafter`; state per sequence is the keys and values of its context."""

    def __init__(
        self, runner: BlockRunner, num_pages: int, *, block_size: int, window_tokens: int
    ) -> None:
        """Args:
        num_pages: of the runner's pool, the padding page included.
        block_size: rows of a block, the last committed token included; at least 2.
        window_tokens: positions before the block that it sees, to the page.
        """
        self._runner = runner
        self._pool = PagePool(num_pages)
        self._block_size = block_size
        self._window_tokens = window_tokens
        self._states: dict[SequenceKey, _State] = {}

    @property
    def foresight(self) -> None:
        """Every tree follows its verdict."""

    @property
    def limits(self) -> DrafterLimits:
        head = self._runner.head
        return DrafterLimits(
            vocab_size=head.vocab_size,
            max_context_tokens=self._window_tokens + self._block_size,
            feature_spec=head.feature_spec,
        )

    def open(self, sequence: DraftSequence) -> None:
        self._states[sequence.key] = _State(ContextPages(self._runner.page_size))
        self._slide(sequence)

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        if features is not None:
            self.add_features(sequence, features)
        self._slide(sequence)

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        state = self._states[sequence.key]
        state.features.append(rows)
        if state.features.start > state.context.end:
            # The target cannot send what came before, so that is no part of the context.
            state.context.restart(self._pool, state.features.start)
        state.features.drop_before(state.context.end)

    def backlog(self, sequence: DraftSequence) -> int:
        state = self._states[sequence.key]
        end = min(state.features.end, sequence.num_tokens - 1)
        return max(end - state.context.end, 0)

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        end = sequence.num_tokens - 1 + self._block_size
        try:
            self._states[sequence.key].context.grow(self._pool, end)
        except OutOfPages:
            return False
        return True

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
        chunk: list[tuple[DraftSequence, int]] = []
        num_taken = 0
        for sequence in sequences:
            count = min(self.backlog(sequence), max_tokens - num_taken)
            chunk.append((sequence, count))
            num_taken += count
        self._take_in(chunk)
        return num_taken

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        complete = [sequence for sequence in sequences if self._is_complete(sequence)]
        waiting = [sequence for sequence in sequences if not self._is_complete(sequence)]
        grown = self._draft(complete, shape) if complete else []
        return [*grown, *(Proposal(sequence, EMPTY_TREE) for sequence in waiting)]

    def close(self, sequence: DraftSequence) -> None:
        self._pool.release(self._states.pop(sequence.key).context.pages)

    def flush_prefix_cache(self) -> int:
        """Nothing to free: features come for every sequence, so nothing is shared."""
        return 0

    def gauges(self) -> Mapping[str, float]:
        buffers = [state.features for state in self._states.values()]
        return {
            "page_count": float(self._pool.num_pages),
            "free_page_count": float(self._pool.num_free),
            "held_page_count": float(self._pool.num_pages - self._pool.num_free),
            "held_feature_row_count": float(sum(each.end - each.start for each in buffers)),
        }

    def check(self) -> None:
        held = [page for state in self._states.values() for page in state.context.pages]
        assert len(set(held)) == len(held), "a page has two owners"
        assert len(held) + self._pool.num_free == self._pool.num_pages, "a page has no owner"

    def _draft(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        self._take_in([(sequence, self.backlog(sequence)) for sequence in sequences])
        depth = min(self._block_size - 1, shape.num_steps, shape.max_node_count)
        logits = self._run([self._block_rows(sequence, depth) for sequence in sequences])
        scores = DraftScores(sequences, self._runner.device).of_block(logits)
        best = stable_topk(scores, min(shape.topk, scores.shape[2]))
        # The one wait for the device; token ids are exact in float64.
        log_probs, token_ids = torch.stack([part.to(torch.float64) for part in best]).tolist()
        return [
            Proposal(sequence, grow_block_tree(_integers(tokens), values, shape.max_node_count))
            for sequence, tokens, values in zip(sequences, token_ids, log_probs, strict=True)
        ]

    def _is_complete(self, sequence: DraftSequence) -> bool:
        """Whether the features of every committed position but the last are here."""
        context, end = self._states[sequence.key].context, sequence.num_tokens - 1
        return context.start < end == context.end + self.backlog(sequence)

    def _take_in(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        """Turns the features of the next positions of each sequence into keys and values."""
        pieces, positions, slots = list[Tensor](), list[int](), list[int]()
        for sequence, count in counts:
            state = self._states[sequence.key]
            new = range(state.context.end, state.context.end + count)
            if count:
                pieces += state.features.read(new.start, count)
            positions += new
            slots += state.context.slots(new)
            state.context.end = new.stop
            state.features.drop_before(new.stop)
        if pieces:
            self._runner.write_context(torch.cat(pieces), positions, slots)

    def _block_rows(self, sequence: DraftSequence, depth: int) -> SequenceRows:
        """Lays out the last committed token and the masks behind it, which all see each other."""
        context, size = self._states[sequence.key].context, self._block_size
        first = sequence.num_tokens - 1
        mask = self._runner.head.config.mask_token_id
        return SequenceRows(
            token_ids=[sequence.token_ids[first], *[mask] * (size - 1)],
            positions=range(first, first + size),
            kv_start=context.index(first),
            pages=context.pages,
            prefix_length=context.index(first),
            tail_mask=[[True] * size] * size,
            logit_rows=range(1, depth + 1),
        )

    def _run(self, rows: Sequence[SequenceRows]) -> Tensor:
        runner = self._runner
        return runner.run(build_batch(rows, page_size=runner.page_size, device=runner.device))

    def _slide(self, sequence: DraftSequence) -> None:
        """Positions that no block will see need not even be computed."""
        state = self._states[sequence.key]
        start = sequence.num_tokens - 1 - self._window_tokens
        if start > state.context.start:
            state.context.slide(self._pool, start)
            state.features.drop_before(state.context.end)


def _integers(rows: Sequence[Sequence[float]]) -> list[list[int]]:
    return [[int(value) for value in row] for row in rows]
