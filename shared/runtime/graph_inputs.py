"""The fixed tensors that CUDA graphs read, and copying a batch into them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shared.kernels.split_plan import MAX_PLAIN_ROWS
from shared.kv.batch import ForwardBatch, empty_decode_batch
from shared.kv.pool import KvLayout
from shared.kv.state_plan import StateInputs, StatePlan, StateSlots

# Rows beyond a few hundred are bound by arithmetic, which hides what launches cost.
_FEWEST_ROWS, _MOST_ROWS, _ROWS_A_SEQUENCE = 64, 512, 4


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Sizes of the largest graph.

    Attributes:
        max_rows: rows of a forward.
        max_sequences: sequences of a forward.
        max_tail_width: columns of the tail mask.
        max_context_tokens: longest sequence.
    """

    max_rows: int
    max_sequences: int
    max_tail_width: int
    max_context_tokens: int

    @classmethod
    def of(cls, *, max_sequences: int, max_tree_nodes: int, max_context_tokens: int) -> GraphLimits:
        """Returns limits for steps of up to `max_sequences`, with some rows a sequence."""
        return cls(
            max_rows=min(_MOST_ROWS, max(_FEWEST_ROWS, _ROWS_A_SEQUENCE * max_sequences)),
            max_sequences=max_sequences,
            max_tail_width=max_tree_nodes + MAX_PLAIN_ROWS,
            max_context_tokens=max_context_tokens,
        )


class GraphInputs:
    """A `ForwardBatch` of the largest size, and what is planned of it for recurrent states where
    the layout has some, in memory that never moves.

    A bucket of R rows and B sequences reads the first of every tensor, so all graphs share these.

    Attributes:
        num_pages: columns of the page table; a sequence may hold more pages than its rows need.
    """

    def __init__(self, limits: GraphLimits, layout: KvLayout, device: torch.device) -> None:
        num_rows, num_sequences = limits.max_rows, limits.max_sequences
        page_size, self._states = layout.page_size, None
        if layout.states is not None:
            # A path a row, and what a sequence has committed since its last step.
            line = limits.max_tail_width + layout.states.window
            num_places = (num_rows + num_sequences) * line
            self._states = StateSlots(num_rows, num_sequences, num_places, device)
        self.num_pages = num_pages = -(-limits.max_context_tokens // page_size)
        self._whole = ForwardBatch(
            token_ids=torch.zeros(num_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            slots=torch.zeros(num_rows, dtype=torch.int64, device=device),
            query_starts=torch.zeros(num_sequences + 1, dtype=torch.int32, device=device),
            kv_lengths=torch.zeros(num_sequences, dtype=torch.int32, device=device),
            prefix_lengths=torch.zeros(num_sequences, dtype=torch.int32, device=device),
            page_table=torch.zeros((num_sequences, num_pages), dtype=torch.int32, device=device),
            tail_mask=torch.zeros(
                num_rows * limits.max_tail_width, dtype=torch.bool, device=device
            ).view(num_rows, limits.max_tail_width),
            is_causal=torch.ones(num_sequences, dtype=torch.bool, device=device),
            logit_rows=torch.zeros(num_rows, dtype=torch.int64, device=device),
            # One row keeps every sequence out of the chunk kernel, whose blocks a graph lacks.
            max_query_length=1,
            max_kv_length=limits.max_context_tokens,
            page_size=page_size,
        )

    def bucket(self, num_rows: int, num_sequences: int, *, has_tail: bool) -> ForwardBatch:
        """Returns the batch that a graph of this size reads."""
        whole = self._whole
        mask = whole.tail_mask
        assert mask is not None
        return replace(
            whole,
            token_ids=whole.token_ids[:num_rows],
            positions=whole.positions[:num_rows],
            slots=whole.slots[:num_rows],
            query_starts=whole.query_starts[: num_sequences + 1],
            kv_lengths=whole.kv_lengths[:num_sequences],
            prefix_lengths=whole.prefix_lengths[:num_sequences],
            page_table=whole.page_table[:num_sequences],
            tail_mask=mask[:num_rows] if has_tail else None,
            is_causal=whole.is_causal[:num_sequences],
            logit_rows=whole.logit_rows[:num_rows],
        )

    def states(self, num_rows: int, num_sequences: int, *, has_tail: bool) -> StateInputs | None:
        """Returns the plan that a graph of this size reads; None where there are no states."""
        if self._states is None:
            return None
        return self._states.inputs.first(num_rows, num_sequences, has_tail=has_tail)

    def fits(self, plan: StatePlan | None) -> bool:
        """Whether there is room: not for sequences that lost their state, and begin anew."""
        return plan is None or (self._states is not None and self._states.fits(plan))

    def fill_with_nobody(self, bucket: ForwardBatch) -> None:
        """Queues a batch without a sequence of anybody: what a capture computes.

        What was planned for the forward before goes as well: to follow that plan once more would
        advance states that are advanced already.
        """
        self.fill(bucket, empty_decode_batch(1, bucket.page_size, bucket.token_ids.device))
        if self._states is not None:
            self._states.clear()

    def fill_states(self, plan: StatePlan | None) -> None:
        """Queues a plan that fits, in one copy; None where there are no states."""
        if plan is not None:
            assert self._states is not None
            self._states.fill(plan)

    def fill(self, bucket: ForwardBatch, batch: ForwardBatch) -> None:
        """Copies `batch` to the front of `bucket` and pads the rest, in one launch."""
        from shared.kernels.padding_jit import pad_batch

        mask, target_mask = batch.tail_mask, bucket.tail_mask
        num_programs = max(len(bucket.token_ids), len(bucket.kv_lengths) + 1)
        # A batch of causal rows has no mask; its rows read none either.
        has_tail = mask is not None and target_mask is not None
        pad_batch[(num_programs,)](
            batch.token_ids, batch.positions, batch.slots, batch.logit_rows,
            batch.query_starts, batch.kv_lengths, batch.prefix_lengths, batch.is_causal,
            batch.page_table, batch.is_causal if mask is None else mask,
            bucket.token_ids, bucket.positions, bucket.slots, bucket.logit_rows,
            bucket.query_starts, bucket.kv_lengths, bucket.prefix_lengths, bucket.is_causal,
            bucket.page_table, bucket.is_causal if target_mask is None else target_mask,
            len(batch.token_ids), len(batch.logit_rows), len(batch.kv_lengths),
            batch.page_table.shape[1], 1 if mask is None else mask.shape[1],
            len(bucket.token_ids), len(bucket.kv_lengths), bucket.page_table.shape[1],
            1 if target_mask is None else target_mask.shape[1],
            HAS_TAIL=has_tail, BLOCK=128, num_warps=4,
        )  # fmt: skip
