"""From a plan to the rows of a forward, and from accepted nodes to KV slots. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from services.target.scheduler import ScheduledSequence
from shared.kv.batch import SequenceRows


def sequence_rows(entry: ScheduledSequence) -> SequenceRows:
    """Returns the rows of one scheduled sequence: committed tokens, then tree nodes.

    Logits are wanted of the last committed token and of every node, and only when the step
    reaches the last committed token.
    """
    sequence, tree = entry.sequence, entry.tree
    assert sequence.lease is not None
    start = sequence.num_computed
    last_position = start + entry.num_rows - 1
    num_all = entry.num_rows + len(tree)
    return SequenceRows(
        token_ids=[*sequence.token_ids[start : start + entry.num_rows], *tree.token_ids],
        positions=[
            *range(start, start + entry.num_rows),
            *(last_position + depth for depth in tree.depths),
        ],
        kv_start=start,
        pages=sequence.lease.pages,
        prefix_length=start,
        tail_mask=_tail_mask(entry) if len(tree) else None,
        logit_rows=range(entry.num_rows - 1, num_all) if entry.is_complete else (),
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


def _tail_mask(entry: ScheduledSequence) -> list[list[bool]]:
    """Committed rows are causal; a node sees every committed row, its ancestors and itself."""
    num_rows, tree = entry.num_rows, entry.tree
    num_all = num_rows + len(tree)
    mask = [[column <= row for column in range(num_all)] for row in range(num_rows)]
    for node, parent in enumerate(tree.parent_indices):
        seen = list(mask[num_rows - 1 if parent is None else num_rows + parent])
        seen[num_rows + node] = True
        mask.append(seen)
    return mask
