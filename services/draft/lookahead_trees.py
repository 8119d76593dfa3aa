"""The verdicts a tree under verification may end in, and a tree for each.

An *outcome* is a verdict: the node it ends at and the bonus token after it. Its *tree* hangs off
the bonus token and is what the target verifies next if the verdict is this one.

Preparing costs one forward a level for all outcomes of all sequences together: they share the
committed tokens and the verified tree, whose keys and values are there already.

Source: Kumar, Dao, May, "Speculative speculative decoding", arXiv 2603.03251 (drafting ahead for
likely verdicts); trees and the choice of outcomes by path probability are ours.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.draft.drafters.tails import Tail, TailNode
from services.draft.likely_verdicts import FanOut, RankShares
from shared.tokens import TokenTree, TreeShape


class GrowingTree:
    """A tree below a node, grown level by level as in EAGLE-2.

    Source: arXiv 2406.16858; `shared.speculation.tree` is the same on tensors of fixed shapes.
    """

    def __init__(self, root: TailNode, shape: TreeShape, *, max_depth: int) -> None:
        """`max_depth` is that of the deepest node computed, from the tail's root."""
        self._root = root
        self._max_depth = max_depth
        self._shape = shape
        self._frontier: list[TailNode] = [root]
        self._nodes: list[TailNode] = []
        self._level = 0

    @property
    def is_complete(self) -> bool:
        return self._level == self._shape.num_steps or not self._frontier

    def next_nodes(self) -> list[TailNode]:
        """Returns the nodes to compute next; none when the tree is complete."""
        while not self.is_complete:
            pending = [node for node in self._frontier if not node.is_computed]
            if pending:
                return pending
            self._expand()
        return []

    def finish(self) -> TokenTree:
        """Returns the best nodes as a tree."""
        kept = set(self._best(self._nodes, self._shape.max_node_count))
        nodes = [node for node in self._nodes if node in kept]
        index: dict[TailNode | None, int | None] = {self._root: None}
        for node in nodes:
            index[node] = len(index) - 1
        return TokenTree(
            tuple(node.token for node in nodes),
            tuple(index[node.parent] for node in nodes),
            tuple(node.log_prob for node in nodes),
        )

    def _expand(self) -> None:
        children = [
            node.child(token)
            for node in self._frontier
            for token, log_prob in node.continuations[: self._shape.topk]
            if log_prob > -math.inf
        ]
        self._nodes += children
        reachable = [node for node in children if node.depth <= self._max_depth]
        self._frontier = self._best(reachable, self._shape.topk)
        self._level += 1

    @staticmethod
    def _best(nodes: Sequence[TailNode], count: int) -> list[TailNode]:
        """Among equals the earlier wins, which a parent is."""
        return heapq.nsmallest(count, nodes, key=lambda node: -node.path_log_prob)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A verdict that is prepared for.

    Attributes:
        node_index: last accepted node of the verified tree; None when none is accepted.
        bonus: the token after it.
        tree: what to verify then.
    """

    node_index: int | None
    bonus: TailNode
    tree: GrowingTree


class LookaheadTrees:
    """Everything that is prepared while one tree of one sequence is verified.

    First the nodes of the tree that are not computed yet, then the likeliest outcomes, then their
    trees. What is left of the time goes into the leaves of those trees, which are then computed
    when one of the trees is verified itself.
    """

    def __init__(
        self,
        tail: Tail,
        tree: TokenTree,
        shape: TreeShape,
        fan_out: FanOut,
        shares: RankShares,
        *,
        max_depth: int,
    ) -> None:
        """`max_depth` is that of the deepest node computed; the context ends beyond it."""
        self.tail = tail
        self._max_depth = max_depth
        self.outcomes: list[Outcome] = []
        self._shape = shape
        self._fan_out = fan_out
        self._shares = shares
        self._index = _nodes_of(tail, tree)
        self._reached = self._worth_reaching()
        self._has_chosen = False

    def next_nodes(self) -> list[TailNode]:
        """Returns the nodes to compute next; none when every outcome has its tree."""
        if not self._has_chosen:
            pending = [node for node in self._reached if _is_next(node)]
            if pending:
                return pending
            self._choose()
        nodes = [node for each in self.outcomes for node in each.tree.next_nodes()]
        return list(dict.fromkeys(nodes))

    def leaves(self) -> list[TailNode]:
        """Returns leaves of finished trees, likeliest outcome first, to compute ahead."""
        nodes = [leaf for each in self.outcomes for leaf in _leaves(each, self._max_depth)]
        return nodes[: self._fan_out.budget]

    def _worth_reaching(self) -> list[TailNode]:
        """A verdict may end at any node, but only the likeliest leaves are worth a row."""
        inner = {node.parent for node in self._index}
        leaves = [node for node in self._index if node not in inner]
        spared = set(
            heapq.nsmallest(self._fan_out.budget, leaves, key=lambda node: -self._log_prob(node))
        )
        return [node for node in self._index if node in spared or node in inner]

    def _choose(self) -> None:
        best = heapq.nsmallest(self._fan_out.budget, self._possible(), key=lambda each: -each[0])
        for _, node, token in best:
            bonus = node.child(token)
            tree = GrowingTree(bonus, self._shape, max_depth=self._max_depth)
            self.outcomes.append(Outcome(self._index.get(node), bonus, tree))
        self._has_chosen = True

    def _possible(self) -> Iterator[tuple[float, TailNode, int]]:
        """Yields outcomes with their log probability: a token that is no child in the tree."""
        for node in (self.tail.root, *self._index):
            if not node.is_computed or node.depth >= self._max_depth:
                continue
            before = self._log_prob(node)
            for rank, (token, log_prob) in enumerate(node.continuations):
                child = node.children.get(token)
                if log_prob > -math.inf and (child is None or child not in self._index):
                    yield before + self._shares.log_prob(rank, log_prob), node, token

    def _log_prob(self, node: TailNode) -> float:
        """Returns the log probability that the target gets to a node."""
        return sum(self._shares.log_prob(each.rank, each.log_prob) for each in node.line)


def _nodes_of(tail: Tail, tree: TokenTree) -> dict[TailNode, int]:
    """Returns the index of each node of the verified tree, parents first."""
    nodes: list[TailNode] = []
    for token, parent in zip(tree.token_ids, tree.parent_indices, strict=True):
        nodes.append((tail.root if parent is None else nodes[parent]).child(token))
    return {node: index for index, node in enumerate(nodes)}


def _is_next(node: TailNode) -> bool:
    return not node.is_computed and (node.parent is None or node.parent.is_computed)


def _leaves(outcome: Outcome, max_depth: int) -> list[TailNode]:
    """Nodes of the outcome's tree that a verdict may end at and that are not computed."""
    tree = outcome.tree.finish()
    nodes: list[TailNode] = []
    for token, parent in zip(tree.token_ids, tree.parent_indices, strict=True):
        nodes.append((outcome.bonus if parent is None else nodes[parent]).child(token))
    return [node for node in nodes if _is_next(node) and node.depth <= max_depth]
