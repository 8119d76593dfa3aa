"""One round whose trees the device selects, from its launch to its commit: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from services.target.draw import Decision
from services.target.sequence import Sequence
from services.target.step_plan import ScheduledSequence, pruned
from shared.runtime.prepared_trees import Ending, PreparedTree
from shared.runtime.round_sequences import SequenceRound
from shared.tokens import Candidate, TokenTree, TreeShape


@dataclass(slots=True, eq=False)
class SelectedRound:
    """The host's record of a launched round.

    Attributes:
        trees: what is verified of each sequence that takes part, as far as that is known: of those
            that wait for the end of the round before, once that was read.
        offered: what was prepared for those.
        start_s: when it was launched.
        host_gap_s: how long the device had nothing to do before, because of the host.
    """

    trees: dict[int, TokenTree]
    offered: Mapping[int, tuple[Candidate, ...]]
    shape: TreeShape
    start_s: float
    host_gap_s: float


def conditional_trees(
    sequence: Sequence, verified: TokenTree, candidates: SequenceOf[Candidate]
) -> tuple[tuple[Candidate, PreparedTree], ...]:
    """Returns candidates for verdicts on a tree that is being verified, as the device takes them;
    not those for nodes that it does not have, or for verdicts that end the sequence, nor any behind
    an empty tree: its verdict names no candidate."""
    if not verified.token_ids:
        return ()
    depths = (0, *verified.depths)
    found: list[tuple[Candidate, PreparedTree]] = []
    for each in candidates:
        assert each.condition is not None
        node, bonus = each.condition.node_index, each.condition.bonus_token_id
        row = 0 if node is None else node + 1
        if row >= len(depths) or bonus in sequence.stop_token_ids:
            continue
        num_committed = depths[row] + 1
        if num_committed < sequence.num_remaining:
            num_tokens = len(sequence.token_ids) + num_committed
            found.append((each, PreparedTree(num_tokens, each.tree, Ending(row, bonus))))
    return tuple(found)


def as_step(
    sequence: Sequence, tree: TokenTree, result: SequenceRound
) -> tuple[ScheduledSequence, Decision]:
    """Returns a sequence's part of a round as if a step of the general path had done it, which
    leaves out what is beyond the end of the output."""
    tree, nodes = pruned(tree, sequence.num_remaining - 1)
    token_ids = result.token_ids[: sequence.num_remaining]
    entry = ScheduledSequence(sequence, sequence.num_computed, 1, tree, nodes, is_complete=True)
    logprobs = result.logprobs[: len(token_ids)]
    return entry, Decision(_accepted_nodes(tree, token_ids[:-1]), token_ids, logprobs)


def _accepted_nodes(tree: TokenTree, token_ids: SequenceOf[int]) -> tuple[int, ...]:
    """Returns the nodes that spell out tokens, the first one among siblings with one token."""
    path: list[int] = []
    nodes = enumerate(zip(tree.parent_indices, tree.token_ids, strict=True))
    for token_id in token_ids:
        # Children come behind their parents, so no node is looked at twice.
        wanted = (path[-1] if path else None, token_id)
        path.append(next(node for node, found in nodes if found == wanted))
    return tuple(path)
