"""Drafts ahead: prepares trees for likely verdicts while their target verifies.

Work is cut into single forwards, so that a verdict that arrives meanwhile is heeded after the one
in progress. What was computed for it stays in the tail, so the tree it calls for goes on from
there; what was computed for other verdicts is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.draft.draft_scores import DraftScores
from services.draft.drafters.drafter import Lookahead, Proposal
from services.draft.drafters.tails import Tail, TailNode
from services.draft.drafters.whole_trees import grows_whole
from services.draft.likely_verdicts import FanOut, RankShares
from services.draft.lookahead_trees import GrowingTree, LookaheadTrees
from services.draft.sequence import DraftSequence, SequenceKey
from shared.speculation.tree import choose_children
from shared.tokens import EMPTY_TREE, Condition, TokenTree, TreeShape


@dataclass(frozen=True, slots=True, eq=False)
class TailWork:
    """Nodes of one sequence's tail that are to be computed.

    Attributes:
        width: how many continuations of each are wanted.
    """

    sequence: DraftSequence
    tail: Tail
    nodes: Sequence[TailNode]
    width: int


@dataclass(slots=True, eq=False)
class _Block:
    """The rows prepared for the verdicts on one sequence's tree.

    Attributes:
        width: continuations wanted of each node: children of a tree and outcomes beside them.
        is_delivered: the trees are out; only their leaves are left to compute.
    """

    sequence: DraftSequence
    growth: LookaheadTrees
    width: int
    is_delivered: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Resumed:
    """The tree for a current round, grown on from what is left of the tail."""

    sequence: DraftSequence
    tail: Tail
    tree: GrowingTree
    width: int


class OutcomeDrafter:
    """Grows the outcomes of many sequences together. See `Lookahead`.

    Args:
        tail_of: returns the tail whose root is the sequence's last committed token; None when
            the sequence has none to grow from.
        compute: computes nodes, one forward for all; returns the sequences it had memory for.
        max_depth: of the deepest node computed; the context ends beyond it.
        keeps_rows: rows of the verified tree stay good after a verdict, so that computing leaves
            ahead saves a forward later.
    """

    def __init__(
        self,
        tail_of: Callable[[DraftSequence], Tail | None],
        compute: Callable[[Sequence[TailWork]], Sequence[DraftSequence]],
        *,
        max_depth: int,
        keeps_rows: bool,
    ) -> None:
        self.budget = 0
        self._tail_of = tail_of
        self._compute = compute
        self._max_depth = max_depth
        self._keeps_rows = keeps_rows
        self._shares = RankShares()
        self._blocks: dict[SequenceKey, _Block] = {}
        self._resumed: dict[SequenceKey, _Resumed] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._blocks or self._resumed)

    def begin(
        self, sequence: DraftSequence, tree: TokenTree, shape: TreeShape, fan_out: FanOut
    ) -> None:
        tail = self._tail_of(sequence)
        if tail is not None:
            growth = LookaheadTrees(
                tail, tree, shape, fan_out, self._shares, max_depth=self._max_depth
            )
            width = shape.topk + fan_out.budget
            self._blocks[sequence.key] = _Block(sequence, growth, width)

    def resume(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        if sequence.key in self._resumed:
            return True
        tail = self._tail_of(sequence) if self._keeps_rows else None
        if tail is None or not tail.root.continuations:
            return False
        tree = GrowingTree(tail.root, shape, max_depth=self._max_depth)
        self._resumed[sequence.key] = _Resumed(sequence, tail, tree, shape.topk + self.budget)
        return True

    def observe(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """Learns from a verdict, before the tail is rooted anew.

        Args:
            token_ids: what it commits.
        """
        tail = self._tail_of(sequence)
        node = None if tail is None else tail.root
        for token in token_ids:
            if node is None or not node.continuations:
                return
            self._shares.observe(node.rank_of(token))
            node = node.children.get(token)

    def drop(self, sequence: DraftSequence) -> None:
        """Forgets what is prepared for a sequence: a verdict fell, or it ended."""
        self._blocks.pop(sequence.key, None)
        self._resumed.pop(sequence.key, None)

    def advance(self) -> list[Proposal]:
        work = self._owed() or self._leaves()
        served = {each.key for each in self._compute(work)} if work else set()
        unserved = [each.sequence for each in work if each.sequence.key not in served]
        # An empty tree says that there is nothing to wait for.
        given_up = [Proposal(s, EMPTY_TREE) for s in unserved if s.key in self._resumed]
        for sequence in unserved:
            self.drop(sequence)
        return [*given_up, *self._take_resumed(), *self._take_blocks()]

    def _owed(self) -> list[TailWork]:
        work = [
            TailWork(each.sequence, each.tail, each.tree.next_nodes(), each.width)
            for each in self._resumed.values()
        ]
        work += [
            TailWork(each.sequence, each.growth.tail, each.growth.next_nodes(), each.width)
            for each in self._blocks.values()
        ]
        return [each for each in work if each.nodes]

    def _leaves(self) -> list[TailWork]:
        """The work for an idle device; closes the blocks that have none left."""
        done = [each for each in self._blocks.values() if each.is_delivered]
        for each in done:
            del self._blocks[each.sequence.key]
        if not self._keeps_rows:
            return []
        work = [
            TailWork(each.sequence, each.growth.tail, each.growth.leaves(), each.width)
            for each in done
        ]
        return [each for each in work if each.nodes]

    def _take_resumed(self) -> list[Proposal]:
        done = [each for each in self._resumed.values() if not each.tree.next_nodes()]
        for each in done:
            del self._resumed[each.sequence.key]
        return [Proposal(each.sequence, each.tree.finish()) for each in done]

    def _take_blocks(self) -> list[Proposal]:
        """The trees of one sequence are complete together, likeliest verdict first."""
        proposals: list[Proposal] = []
        for block in self._blocks.values():
            if block.is_delivered or block.growth.next_nodes():
                continue
            block.is_delivered = True
            proposals += [
                Proposal(
                    block.sequence, each.tree.finish(), Condition(each.node_index, each.bonus.token)
                )
                for each in block.growth.outcomes
            ]
        return proposals


def learn_rows(work: Sequence[TailWork], logits: Tensor, device: torch.device) -> None:
    """Takes the logits `[L, V]` of the nodes, end to end. Waits for the device."""
    scores = DraftScores([each.sequence for each in work], device)
    paths = [[node.path for node in each.nodes] for each in work]
    width = min(max(each.width for each in work), logits.shape[1])
    best = choose_children(scores.of_ragged(logits, paths).unsqueeze(1), width)
    nodes = [node for each in work for node in each.nodes]
    for node, [continuations] in zip(nodes, best.on_host(), strict=True):
        node.learn(continuations)


class JointLookahead:
    """See `Lookahead`.

    Args:
        whole: for the sequences that `grows_whole`.
        levels: for the others.
    """

    def __init__(self, whole: Lookahead, levels: OutcomeDrafter) -> None:
        self._whole, self._levels = whole, levels

    @property
    def budget(self) -> int:
        return self._levels.budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._whole.budget = self._levels.budget = budget

    @property
    def has_work(self) -> bool:
        return self._whole.has_work or self._levels.has_work

    def begin(
        self, sequence: DraftSequence, tree: TokenTree, shape: TreeShape, fan_out: FanOut
    ) -> None:
        self._of(sequence).begin(sequence, tree, shape, fan_out)

    def resume(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        return self._of(sequence).resume(sequence, shape)

    def advance(self) -> list[Proposal]:
        proposals = self._whole.advance() if self._whole.has_work else []
        return proposals + (self._levels.advance() if self._levels.has_work else [])

    def _of(self, sequence: DraftSequence) -> Lookahead:
        return self._whole if grows_whole(sequence) else self._levels
