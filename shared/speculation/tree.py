"""Rows of token trees: row 0 is the root, row i + 1 is node i.

The root is the last committed token, whose KV is computed in the same forward as the nodes'.
Functions of one tree run on the host. The functions of `TreeRows` do the same, and the work of
`verify.accept_path`, for a whole batch, in fixed shapes and without waiting for the device."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.speculation.distributions import stable_topk
from shared.tokens import TokenTree, TreeShape

# Draft trees grow level by level and keep the nodes most likely to be accepted.
#
# A *candidate* is a child of an expanded node. A level's best `topk` candidates are its *beam*, the
# nodes that the draft computes next; each takes a *growth row*, `level * topk + place in the beam`.
#
# Trees of a batch grow together in tensors of fixed shapes, and nothing waits for the device before
# `finish`, so a CUDA graph can capture a whole growth.
#
# Source: EAGLE-2, Li et al., arXiv 2406.16858, sections 4.1 (expansion) and 4.2 (reranking).


@dataclass(frozen=True, slots=True)
class Children:
    """The best children of each expanded node.

    Attributes:
        token_ids: `[B, N, topk]` int64, best first; N is 1 for the root, then `topk`.
        log_probs: `[B, N, topk]` float32, score of the child given its parent, at most 0.
    """

    token_ids: Tensor
    log_probs: Tensor

    def best(self, count: int) -> Children:
        """Returns the first `count` children of each node."""
        return Children(self.token_ids[..., :count], self.log_probs[..., :count])


@dataclass(frozen=True, slots=True)
class Beam:
    """The nodes of one level to compute next, K = `topk` of each tree.

    Attributes:
        token_ids: `[B, K]` int64.
        log_probs: `[B, K]` float32, score of the path from the root.
        parents: `[B, K]` int64, place of the parent in the previous beam; 0 (the root) at level 0.
        visible: `[B, K, (level + 1) * K]` bool, the growth rows that each row sees: its ancestors
            and itself. Every row also sees the root and all tokens before the root.
    """

    token_ids: Tensor
    log_probs: Tensor
    parents: Tensor
    visible: Tensor

    def on_host(self) -> list[BeamRows]:
        """Returns the beam of each tree on the host. Waits for the device once."""
        columns = (self.token_ids.unsqueeze(2), self.parents.unsqueeze(2), self.visible)
        packed = torch.cat(columns, dim=2).tolist()
        return [
            BeamRows(
                [row[0] for row in rows],
                [row[1] for row in rows],
                [list(map(bool, row[2:])) for row in rows],
            )
            for rows in packed
        ]


@dataclass(frozen=True, slots=True)
class BeamRows:
    """A beam of one tree on the host; see `Beam`."""

    token_ids: list[int]
    parents: list[int]
    visible: list[list[bool]]


@dataclass(frozen=True, slots=True)
class SelectedNodes:
    """The N best nodes of each of B trees, in the order in which they were found.

    Attributes:
        candidates: `[B, N]` int64, ascending; candidates of all levels are numbered from 0.
        token_ids: `[B, N]` int64.
        parents: `[B, N]` int64, the parent's candidate number plus 1; 0 is the root.
        path: `[B, N]` float32, score of the path from the root; -inf where there is no node.
    """

    candidates: Tensor
    token_ids: Tensor
    parents: Tensor
    path: Tensor


@dataclass(frozen=True, slots=True)
class _Level:
    """All candidates of one level, M = N * topk of each tree. `path` are path scores; `parents`
    number the candidates of all levels from 1, as 0 is the root."""

    token_ids: Tensor
    parents: Tensor
    path: Tensor
    first_candidate: int


def choose_children(scores: Tensor, topk: int) -> Children:
    """Returns the `topk` best children of each node.

    Args:
        scores: `[B, N, V]` float32, see `coupled_confidence`; -inf removes a token.
        topk: at most V.
    """
    log_probs, token_ids = stable_topk(scores, topk)
    return Children(token_ids=token_ids, log_probs=log_probs)


def parent_states(states: Tensor, parents: Tensor) -> Tensor:
    """Returns `[S * K, H]`, the states that the rows of the next beam read.

    Args:
        states: `[S * N, H]` of the last level's rows.
        parents: `[S, K]`, place in the last level of each row's parent.
    """
    num_sequences, hidden_size = parents.shape[0], states.shape[1]
    levels = states.view(num_sequences, -1, hidden_size)
    index = parents.unsqueeze(2).expand(-1, -1, hidden_size)
    return levels.gather(1, index).flatten(0, 1)


class TreeGrowth:
    """B trees of one shape while they grow.

    Use: `add` the root's children; then, `num_steps - 1` times, compute the rows of `select_beam`
    and `add` their children; then `finish`.
    """

    def __init__(self, shape: TreeShape) -> None:
        self._shape = shape
        self._levels: list[_Level] = []
        self._beams: list[Beam] = []
        self._selected: list[Tensor] = []

    @property
    def is_complete(self) -> bool:
        return len(self._levels) == self._shape.num_steps

    def add(self, children: Children) -> None:
        """Adds the children of the root; in later calls the children of the last beam."""
        assert not self.is_complete, f"the tree has its {self._shape.num_steps} levels"
        assert len(self._beams) == len(self._levels), "select the beam before adding its children"
        # Rounding can leave a log probability just above 0; a path must not beat its prefix.
        path = children.log_probs.clamp_max(0.0)
        parents = torch.zeros_like(children.token_ids)
        if self._beams:
            path = path + self._beams[-1].log_probs.unsqueeze(2)
            parents = parents + (self._selected[-1] + 1).unsqueeze(2)
        self._levels.append(
            _Level(
                token_ids=children.token_ids.flatten(1),
                parents=parents.flatten(1),
                path=path.flatten(1),
                first_candidate=sum(level.path.shape[1] for level in self._levels),
            )
        )

    def select_beam(self) -> Beam:
        """Returns the best `topk` candidates of the last level; they take the next growth rows.

        In a complete tree these have no children: they are computed for candidates after leaves.
        """
        assert len(self._beams) == len(self._levels) - 1, "add a level before selecting its beam"
        level, topk = self._levels[-1], self._shape.topk
        log_probs, chosen = stable_topk(level.path, topk)
        # Candidates lie parent by parent, `topk` each.
        parents = chosen // topk
        beam = Beam(
            token_ids=level.token_ids.gather(1, chosen),
            log_probs=log_probs,
            parents=parents,
            visible=self._visible(parents),
        )
        self._beams.append(beam)
        self._selected.append(level.first_candidate + chosen)
        return beam

    def select(self) -> SelectedNodes:
        """Returns the best nodes of each tree; nothing waits for the device.

        A child's path score is at most its parent's, and of equal scores the earlier candidate
        wins, which is the parent. So the best nodes hold every kept node's parent.
        """
        assert self._levels, "nothing was added"
        path = torch.cat([level.path for level in self._levels], dim=1)
        num_kept = min(self._shape.max_node_count, path.shape[1])
        kept = stable_topk(path, num_kept)[1].sort(dim=1).values
        return SelectedNodes(
            candidates=kept,
            token_ids=torch.cat([level.token_ids for level in self._levels], 1).gather(1, kept),
            parents=torch.cat([level.parents for level in self._levels], 1).gather(1, kept),
            path=path.gather(1, kept),
        )

    def finish(self) -> tuple[TokenTree, ...]:
        """Returns the selected trees on the host. Waits for the device once.

        Candidates with score -inf are left out, so a tree may have fewer nodes than the shape
        allows, or none.
        """
        nodes = self.select()
        rows = tree_rows(nodes, torch.zeros_like(nodes.parents[:, 0]), self._shape.num_steps)
        paths = torch.cat((torch.zeros_like(nodes.path[:, :1]), nodes.path), dim=1)
        # All values are exact in float64, so one transfer is enough.
        columns = torch.stack((rows.token_ids.double(), rows.parents.double(), paths.double()), 1)
        return tuple(
            best_tree([*map(int, tokens)], [*map(int, parents)], path, self._shape.max_node_count)
            for tokens, parents, path in columns.tolist()
        )

    def _visible(self, parents: Tensor) -> Tensor:
        batch_size, topk = parents.shape
        own = torch.eye(topk, dtype=torch.bool, device=parents.device)
        own = own.expand(batch_size, topk, topk)
        if not self._beams:
            return own
        before = self._beams[-1].visible
        inherited = before.gather(1, parents.unsqueeze(2).expand(-1, -1, before.shape[2]))
        return torch.cat((inherited, own), dim=2)


def best_tree(
    token_ids: Sequence[int], parents: Sequence[int], paths: Sequence[float], max_nodes: int
) -> TokenTree:
    """Returns the tree of the best nodes.

    Args:
        token_ids: of T rows, the root first; -1 where there is no node.
        parents: row of each row's parent.
        paths: score of the path to each row.
    """
    if len(token_ids) <= max_nodes + 1 and min(paths) > -math.inf:
        above = parents[1:]
        return TokenTree(
            tuple(token_ids[1:]),
            tuple([row - 1 if row else None for row in above]),
            tuple([path - paths[row] for path, row in zip(paths[1:], above, strict=True)]),
        )
    kept = [row for row in range(1, len(token_ids)) if paths[row] > -math.inf]
    if len(kept) > max_nodes:
        # A child's score is at most its parent's and its row comes later, so parents are kept.
        kept = sorted(sorted(kept, key=lambda row: (-paths[row], row))[:max_nodes])
    nodes: dict[int, int | None] = {0: None}
    nodes.update({row: node for node, row in enumerate(kept)})
    return TokenTree(
        token_ids=tuple(token_ids[row] for row in kept),
        parent_indices=tuple(nodes[parents[row]] for row in kept),
        log_probs=tuple(paths[row] - paths[parents[row]] for row in kept),
    )


NO_TOKEN = -1
"""Token of rows without a node, where a tree has fewer nodes than rows."""


def row_parents(tree: TokenTree) -> tuple[int | None, ...]:
    """Returns the row of each row's parent; None for the root."""
    return (None, *(0 if parent is None else parent + 1 for parent in tree.parent_indices))


def row_paths(tree: TokenTree) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids from the root's child down to each row; empty for the root."""
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids, tree.parent_indices, strict=True):
        paths.append((*paths[0 if parent is None else parent + 1], token_id))
    return tuple(paths)


@dataclass(frozen=True, slots=True)
class TreeRows:
    """B trees of T rows each.

    Attributes:
        token_ids: `[B, T]` int64; -1 where a tree has fewer nodes.
        parents: `[B, T]` int64, row of the parent; the root is its own parent.
        depths: `[B, T]` int64, distance from the root.
        visible: `[B, T, T]` bool, the rows that each row sees: the root, its ancestors and itself.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    visible: Tensor

    @property
    def num_nodes(self) -> Tensor:
        """`[B]` int64, number of nodes of each tree."""
        return (self.token_ids[:, 1:] != NO_TOKEN).sum(dim=1)


@dataclass(frozen=True, slots=True)
class AcceptedRows:
    """The decisions on B trees of depth D.

    Attributes:
        counts: `[B]` int64, accepted nodes.
        rows: `[B, D + 1]` int64, the root's row, then the rows of the accepted path; element k
            beyond the path is k.
        token_ids: `[B, D + 1]` int64, the tokens to commit, the bonus token last; 0 beyond.
    """

    counts: Tensor
    rows: Tensor
    token_ids: Tensor


def tree_rows(nodes: SelectedNodes, root_token_ids: Tensor, max_depth: int) -> TreeRows:
    """Lays out selected nodes behind their roots.

    Args:
        root_token_ids: `[B]` int64, the last committed token of each sequence.
        max_depth: greatest depth of any node.
    """
    is_node = nodes.path > -math.inf
    # Candidates ascend, so a binary search finds the place of a parent among them.
    places = torch.searchsorted(nodes.candidates, nodes.parents - 1)
    parents = torch.where(is_node & (nodes.parents > 0), places + 1, 0)
    parents = torch.cat((torch.zeros_like(parents[:, :1]), parents), dim=1)
    tokens = torch.where(is_node, nodes.token_ids, NO_TOKEN)
    return rows_of_parents(
        torch.cat((root_token_ids.unsqueeze(1), tokens), dim=1), parents, max_depth
    )


def rows_of_parents(token_ids: Tensor, parents: Tensor, max_depth: int) -> TreeRows:
    """Returns trees from the tokens `[B, T]` and the parents `[B, T]` of their rows.

    Args:
        max_depth: greatest depth of any node.
    """
    rows = torch.arange(parents.shape[1], device=parents.device)
    ancestors = rows.expand_as(parents)
    visible = (ancestors.unsqueeze(2) == rows) | (rows == 0)
    for _ in range(max_depth - 1):
        ancestors = parents.gather(1, ancestors)
        visible = visible | (ancestors.unsqueeze(2) == rows)
    return TreeRows(token_ids, parents, visible.sum(dim=2) - 1, visible)


def accept_rows(tree: TreeRows, drawn: Tensor, max_depth: int) -> AcceptedRows:
    """Returns the paths whose tokens are the ones the target drew.

    Args:
        drawn: `[B, T]` int64, the token that each row drew; negative in a row that may not draw,
            never in the root's. A path ends before such a node.
        max_depth: D, greatest depth of any node; less than T.
    """
    batch_size, num_rows = drawn.shape
    matches = (tree.token_ids == drawn.gather(1, tree.parents)) & (drawn >= 0)
    matches[:, 0] = True
    # Siblings hold different tokens, so the accepted rows form one path, ordered by row.
    accepted = (matches.unsqueeze(1) | ~tree.visible).all(dim=2)
    steps = torch.arange(max_depth + 1, device=drawn.device)
    # One extra place collects the rows that are not accepted.
    places = torch.where(accepted, accepted.cumsum(dim=1) - 1, max_depth + 1)
    rows = torch.cat((steps, steps.new_zeros(1))).repeat(batch_size, 1)
    all_rows = torch.arange(num_rows, device=drawn.device).expand_as(places)
    rows = rows.scatter(1, places, all_rows)[:, : max_depth + 1]
    counts = accepted.sum(dim=1) - 1
    is_committed = steps <= counts.unsqueeze(1)
    token_ids = torch.where(is_committed, drawn.gather(1, rows), 0)
    return AcceptedRows(counts=counts, rows=rows, token_ids=token_ids)


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """A node that the tree may take next; of equal costs the one found earlier comes first.

    Attributes:
        cost: negative score of the node's path.
        number: order in which nodes are found.
        base: score of the path to the parent.
        rank: place among the parent's children.
    """

    cost: float
    number: int
    base: float = field(compare=False)
    parent: int | None = field(compare=False)
    depth: int = field(compare=False)
    rank: int = field(compare=False)


def grow_block_tree(
    token_ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]], max_nodes: int
) -> TokenTree:
    """Returns the `max_nodes` nodes whose paths have the highest sums of scores.

    A path's score is at most that of the path before its last token, so a node's parent is always
    chosen before it. With one token a position the tree is a chain.

    Args:
        token_ids: the best tokens of each position, best first.
        log_probs: their scores, at most 0; tokens of score -inf are left out.
    """
    nodes: list[_Candidate] = []
    heap: list[_Candidate] = []
    num_pushed = 0

    def push(base: float, parent: int | None, depth: int, rank: int) -> None:
        nonlocal num_pushed
        if depth == len(log_probs) or rank == len(log_probs[depth]):
            return
        # Rounding can leave a log probability just above 0; a path must not beat its prefix.
        score = base + min(log_probs[depth][rank], 0.0)
        if score > -math.inf:
            heapq.heappush(heap, _Candidate(-score, num_pushed, base, parent, depth, rank))
            num_pushed += 1

    push(0.0, None, 0, 0)
    while heap and len(nodes) < max_nodes:
        best = heapq.heappop(heap)
        nodes.append(best)
        push(-best.cost, len(nodes) - 1, best.depth + 1, 0)
        push(best.base, best.parent, best.depth, best.rank + 1)
    return TokenTree(
        token_ids=tuple(token_ids[node.depth][node.rank] for node in nodes),
        parent_indices=tuple(node.parent for node in nodes),
        log_probs=tuple(min(log_probs[node.depth][node.rank], 0.0) for node in nodes),
    )
