"""Drafted subtrees of a recurrent head: rows behind the committed tokens, and rows ahead of
verdicts.

A node's row reads the state that its parent's row left; below the last committed token that is the
state of the committed row, which is computed from the target's features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from services.draft.drafters.draft_kv import SequenceKv
from services.draft.drafters.head_contexts import HeadContexts, num_window_rows
from services.draft.drafters.outcome_drafter import TailWork, learn_rows
from services.draft.drafters.tail import Tail
from services.draft.drafters.tree_tail import TreeTail
from services.draft.sequence import DraftSequence
from shared.runtime.head_runner import HeadOutput


class HeadTails:
    """Keeps and computes the tails of every sequence of one drafter."""

    def __init__(self, contexts: HeadContexts, device: torch.device) -> None:
        self._contexts = contexts
        self._device = device

    def tail_of(self, sequence: DraftSequence) -> Tail | None:
        """None when features are missing: then what was verified cannot be computed."""
        kv = self._contexts.kv_of(sequence)
        is_computed = kv.num_computed == num_window_rows(kv, sequence)
        return kv.tail if is_computed or self._contexts.is_complete(sequence) else None

    def keep(
        self,
        sequences: Sequence[DraftSequence],
        tails: Sequence[TreeTail],
        outputs: Sequence[HeadOutput],
    ) -> None:
        """Keeps the rows and states of trees that were just grown, level by level."""
        levels = [each.states.view(len(tails), -1, each.states.shape[1]) for each in outputs]
        for place, (sequence, tail) in enumerate(zip(sequences, tails, strict=True)):
            tail.keep_states([level[place].unbind() for level in levels])
            self._contexts.kv_of(sequence).tail = tail.tail

    def compute(self, work: Sequence[TailWork]) -> list[DraftSequence]:
        """Computes nodes, one forward for all sequences; before that the tokens that a verdict
        committed. Returns the sequences it had memory for."""
        served = [each for each in work if self._has_room(each)]
        if not served:
            return []
        due = [each for each in served if self._is_root_due(each)]
        if due:
            self._compute_roots(due)
        self._compute_nodes(served)
        return [each.sequence for each in served]

    def _is_root_due(self, work: TailWork) -> bool:
        """Whether a verdict committed tokens that are not computed."""
        return self._contexts.backlog(work.sequence) > 0

    def _compute_roots(self, work: Sequence[TailWork]) -> None:
        counts = [(each.sequence, self._contexts.backlog(each.sequence)) for each in work]
        output = self._contexts.compute(counts, with_logits=True)
        for each in work:
            each.tail.base = self._contexts.kv_of(each.sequence).num_computed
        self._learn([replace(each, nodes=[each.tail.root]) for each in work], output)

    def _compute_nodes(self, work: Sequence[TailWork]) -> None:
        states = [
            node.parent.state
            for each in work
            for node in each.nodes
            if node.parent is not None and node.parent.state is not None
        ]
        rows = [
            each.tail.lay_out(each.nodes, self._contexts.kv_of(each.sequence).lease.pages)
            for each in work
        ]
        self._learn(work, self._contexts.run(rows, torch.stack(states)))

    def _learn(self, work: Sequence[TailWork], output: HeadOutput) -> None:
        learn_rows(work, output.logits, self._device)
        nodes = [node for each in work for node in each.nodes]
        for node, state in zip(nodes, output.states.unbind(), strict=True):
            node.state = state

    def _has_room(self, work: TailWork) -> bool:
        kv = self._contexts.kv_of(work.sequence)
        num_rows = num_window_rows(kv, work.sequence) + work.tail.num_rows + len(work.nodes)
        return self._contexts.leases.try_grow(kv.lease, num_rows)


def reroot(kv: SequenceKv, token_ids: Sequence[int]) -> None:
    """Keeps what was drafted ahead below the committed tokens, but none of its rows."""
    path = [] if kv.tail is None else kv.tail.match(token_ids)
    if kv.tail is None or len(path) < len(token_ids):
        kv.tail = None
    else:
        kv.tail.reroot(path[-1])
        kv.tail.forget_rows()
