"""From a plan to the rows of a forward, and from accepted nodes to KV slots. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.target.step_plan import ScheduledSequence
from shared.kv.batch import SequenceRows
from shared.kv.upload import Array

UNREAD = 0
"""Stands for a token that is filled in on the device."""


def sequence_rows(entry: ScheduledSequence) -> SequenceRows:
    """Returns the rows of one scheduled sequence: its tokens, then tree nodes.

    Logits are wanted of the rows that score prompt tokens, and, when the step reaches the last
    token, of that and of every node. A pending token is `UNREAD`: the device has it.
    """
    sequence, tree, start = entry.sequence, entry.tree, entry.start
    known = sequence.token_ids[start : start + entry.num_rows]
    assert not (sequence.num_pending and len(tree)), "a tree cannot hang off an unread token"
    last_position = start + entry.num_rows - 1
    num_all = entry.num_rows + len(tree)
    drawing = range(entry.num_rows - 1, num_all) if entry.is_complete else ()
    return SequenceRows(
        token_ids=[*known, *[UNREAD] * (entry.num_rows - len(known)), *tree.token_ids],
        positions=[
            *range(start, start + entry.num_rows),
            *(last_position + depth for depth in tree.depths),
        ],
        kv_start=start,
        pages=sequence.open_lease.pages,
        prefix_length=start,
        tail_mask=_tail_mask(entry) if len(tree) else None,
        logit_rows=[*entry.scored, *drawing],
    )


def kv_moves(
    entry: ScheduledSequence, accepted_nodes: Sequence[int], page_size: int
) -> list[tuple[int, int]]:
    """Returns (from, to) slots that bring the KV of the accepted path behind the committed tokens.

    Nodes were computed in tree order; after the verdict the accepted ones must stand in path
    order. Nodes that stand right already are left out.
    """
    node_slots = entry.slots(page_size)[entry.num_rows :]
    return [
        (node_slots[node], node_slots[place])
        for place, node in enumerate(accepted_nodes)
        if node != place
    ]


def _tail_mask(entry: ScheduledSequence) -> Array:
    """Committed rows are causal; a node sees every committed row, its ancestors and itself."""
    num_rows, tree = entry.num_rows, entry.tree
    mask = np.tri(num_rows + len(tree), dtype=np.bool_)
    mask[num_rows:, num_rows:] = False
    for node, parent in enumerate(tree.parent_indices, num_rows):
        if parent is not None:
            mask[node] = mask[num_rows + parent]
        mask[node, node] = True
    return mask
