"""Prepares blocks for the verdicts to come: one forward for all verdicts of all sequences.

The features that a verdict will bring are not here yet. In their place a block looks at the tokens
that the verdict would commit: known rows, each of which sees the context and the tokens before it,
shared by the blocks of all verdicts on one tree. A head was trained to find features there, so such
a block is drafted worse than one made after the verdict, the worse the more tokens it commits;
docs/decoding.md has figures. Where the whole block may be accepted nothing scores the token after
it, so that verdict gets a block when it has fallen, from its features.

A conditional block is never made of another: the features of a verdict are here before blocks for
the next one are drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.draft.draft_scores import DraftScores
from services.draft.drafters.block_contexts import BlockContexts, BlockRows
from services.draft.drafters.drafter import Proposal
from services.draft.fan_out import FanOut
from services.draft.likely_verdicts import (
    Continuation,
    LikelyVerdict,
    RankShares,
    likely_verdicts,
    rank_of,
)
from services.draft.sequence import DraftSequence, SequenceKey
from shared.models.heads.dflash import DflashHead
from shared.speculation.block_tree import grow_block_tree
from shared.speculation.distributions import stable_topk
from shared.tokens import TokenTree, TreeShape


@dataclass(frozen=True, slots=True)
class BlockChoices:
    """Marginals of P positions, the best W tokens of each, best first.

    Attributes:
        token_ids, log_probs: `[P][W]`.
    """

    token_ids: Sequence[Sequence[int]]
    log_probs: Sequence[Sequence[float]]

    def __iter__(self) -> Iterator[Sequence[Continuation]]:
        """Yields the choices of each position."""
        return (self.at(position) for position in range(len(self.token_ids)))

    def at(self, position: int) -> Sequence[Continuation]:
        """Returns the choices of a position; none behind the last."""
        if position >= len(self.token_ids):
            return ()
        return list(zip(self.token_ids[position], self.log_probs[position], strict=True))

    def tree(self, shape: TreeShape) -> TokenTree:
        """Returns the best nodes of the first `shape.num_steps` positions."""
        depth, topk = shape.num_steps, shape.topk
        return grow_block_tree(
            [row[:topk] for row in self.token_ids[:depth]],
            [row[:topk] for row in self.log_probs[:depth]],
            shape.max_node_count,
        )


def best_choices(scores: Tensor, width: int) -> list[BlockChoices]:
    """Returns the choices of each block. Waits for the device once.

    Args:
        scores: `[N, P, V]` float32 log probabilities.
        width: choices a position, V at most.
    """
    best = stable_topk(scores, min(width, scores.shape[2]))
    # Token ids are exact in float64, so one transfer brings both.
    log_probs, token_ids = torch.stack([part.to(torch.float64) for part in best]).tolist()
    return [
        BlockChoices([[int(token) for token in row] for row in tokens], values)
        for tokens, values in zip(token_ids, log_probs, strict=True)
    ]


Path = tuple[int, ...]

MAX_ROWS = 2048
"""Rows of one forward, but for those of a single sequence: a verdict that arrives meanwhile waits
for it."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A tree under verification whose verdicts are not prepared for yet."""

    sequence: DraftSequence
    tree: TokenTree
    shape: TreeShape
    fan_out: FanOut
    choices: BlockChoices


@dataclass(frozen=True, slots=True)
class _Work:
    """The blocks of one sequence in a forward.

    Attributes:
        paths: by block, the tokens that its verdict commits.
    """

    in_flight: _InFlight
    verdicts: Sequence[LikelyVerdict]
    paths: Sequence[Path]
    rows: BlockRows


class BlockLookahead:
    """See `Lookahead`.

    Args:
        block_size: rows of a block, the token that opens it included.
    """

    def __init__(self, head: DflashHead, contexts: BlockContexts, *, block_size: int) -> None:
        self.budget = 0
        self._head = head
        self._contexts = contexts
        self._block_size = block_size
        self._shares = RankShares()
        self._in_flight: dict[SequenceKey, _InFlight] = {}
        self._choices: dict[SequenceKey, BlockChoices] = {}
        self._prepared: dict[SequenceKey, dict[Path, BlockChoices]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight)

    def keep(self, sequence: DraftSequence, choices: BlockChoices) -> None:
        """Takes what the tree for the current round was made of."""
        self._choices[sequence.key] = choices

    def begin(
        self, sequence: DraftSequence, tree: TokenTree, shape: TreeShape, fan_out: FanOut
    ) -> None:
        choices = self._choices.get(sequence.key)
        if choices is not None:
            self._in_flight[sequence.key] = _InFlight(sequence, tree, shape, fan_out, choices)

    def resume(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        """Returns False: rows computed ahead lack the features that have arrived since."""
        return False

    def observe(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """Learns which of its choices the target took, and moves on to what was prepared for it.

        Args:
            token_ids: what the verdict commits.
        """
        choices = self._choices.get(sequence.key)
        prepared = self._prepared.get(sequence.key, {}).get(tuple(token_ids))
        self.drop(sequence)
        if choices is not None:
            for own, token in zip(choices, token_ids, strict=False):
                self._shares.observe(rank_of(own, token))
        if prepared is not None:
            self._choices[sequence.key] = prepared

    def drop(self, sequence: DraftSequence) -> None:
        """Forgets a sequence."""
        for kept in (self._in_flight, self._choices, self._prepared):
            kept.pop(sequence.key, None)

    def advance(self) -> list[Proposal]:
        self._take_in()
        work: list[_Work] = []
        while self._in_flight and sum(len(each.rows) for each in work) < MAX_ROWS:
            prepared = self._lay_out(self._in_flight.pop(next(iter(self._in_flight))))
            if prepared is not None:
                work.append(prepared)
        return self._draft(work) if work else []

    def _take_in(self) -> None:
        """Computes the contexts, which end where the rows of blocks begin; gives up on sequences
        whose features are not here, or have no room."""
        contexts = self._contexts
        self._in_flight = {
            key: each
            for key, each in self._in_flight.items()
            if contexts.is_complete(each.sequence) and contexts.reserve(each.sequence, 1)
        }
        sequences = [each.sequence for each in self._in_flight.values()]
        contexts.take_in([(each, contexts.backlog(each)) for each in sequences])

    def _lay_out(self, in_flight: _InFlight) -> _Work | None:
        """Returns the rows of as many verdicts as there is memory for; None for none."""
        sequence, contexts = in_flight.sequence, self._contexts
        verdicts = likely_verdicts(
            in_flight.tree, _by_node(in_flight), self._shares, in_flight.fan_out
        )
        while verdicts:
            work = self._work(in_flight, verdicts)
            if contexts.reserve(sequence, len(work.rows)):
                return work
            verdicts = verdicts[: len(verdicts) // 2]
        return None

    def _work(self, in_flight: _InFlight, verdicts: Sequence[LikelyVerdict]) -> _Work:
        sequence, tree = in_flight.sequence, in_flight.tree
        rows = BlockRows(
            self._contexts.pages_of(sequence),
            block_size=self._block_size,
            mask_token_id=self._head.config.mask_token_id,
        )
        # By place: 0 is the last committed token, then come the nodes, parents first.
        above = [0, *(0 if parent is None else parent + 1 for parent in tree.parent_indices)]
        paths: list[Path] = [()]
        for place, token in enumerate(tree.token_ids, 1):
            paths.append((*paths[above[place]], token))
        known = {0: rows.add_known(None, sequence.token_ids[-1])}
        for place in _through(above, [verdict.place for verdict in verdicts]):
            known[place] = rows.add_known(known[above[place]], tree.token_ids[place - 1])
        for verdict in verdicts:
            rows.add_block(known[verdict.place], verdict.token, self._block_size - 1)
        committed = [(*paths[verdict.place], verdict.token) for verdict in verdicts]
        return _Work(in_flight, verdicts, committed, rows)

    def _draft(self, work: Sequence[_Work]) -> list[Proposal]:
        sequences = [each.in_flight.sequence for each in work]
        logits = self._contexts.run([each.rows.lay_out() for each in work])
        for each in work:
            self._contexts.trim(each.in_flight.sequence, self._block_size)
        scores = DraftScores(sequences, logits.device).of_blocks(
            logits, [each.paths for each in work], self._block_size - 1
        )
        width = max(each.in_flight.shape.topk for each in work) + self.budget
        blocks = iter(best_choices(scores, width))
        return [
            proposal
            for each in work
            for proposal in self._proposals(each, [next(blocks) for _ in each.paths])
        ]

    def _proposals(self, work: _Work, blocks: Sequence[BlockChoices]) -> list[Proposal]:
        sequence, shape = work.in_flight.sequence, work.in_flight.shape
        self._prepared[sequence.key] = dict(zip(work.paths, blocks, strict=True))
        return [
            Proposal(sequence, choices.tree(shape), verdict.condition)
            for verdict, choices in zip(work.verdicts, blocks, strict=True)
        ]


def _by_node(in_flight: _InFlight) -> list[Sequence[tuple[int, float]]]:
    """Returns what may follow the last committed token, then each node; nothing behind the last
    position that the block scored."""
    depths = (0, *in_flight.tree.depths)
    return [in_flight.choices.at(depth) for depth in depths]


def _through(above: Sequence[int], places: Sequence[int]) -> list[int]:
    """Returns the nodes' places on the way to any of `places`, parents first; 0 left out."""
    needed: set[int] = set()
    for place in places:
        while place and place not in needed:
            needed.add(place)
            place = above[place]
    return sorted(needed)
