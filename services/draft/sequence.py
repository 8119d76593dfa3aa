"""A sequence as the draft sees it: the committed tokens, and which answer is owed for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shared.candidate_columns import ConditionKey, condition_key
from shared.tokens import ANY_TREE, SamplingParams, TokenTree, TreeRequest, TreeShape, Verdict

# What is cut away beyond these is drawn too often by a pass that leaves cuts out.
_FEWEST_TOP_K = 4
_LEAST_TOP_P = 0.5
_MOST_MIN_P = 0.5


@dataclass(slots=True)
class InFlightTree:
    """A candidate that was pushed and whose verdict has not arrived.

    Target and draft name it by `candidate_id`. Both choose the next tree by the verdict on this
    one, so they agree on it even if a candidate arrived after the verdict.
    """

    candidate_id: int
    tree: TokenTree
    _pushed: dict[ConditionKey, tuple[int, TokenTree]] = field(default_factory=dict)

    def push(self, condition: ConditionKey, candidate_id: int, tree: TokenTree) -> ConditionKey:
        """Notes a candidate for a verdict on this one; returns the condition that names it."""
        node_index, bonus_token_id, _ = condition
        named = node_index, bonus_token_id, self.candidate_id
        self._pushed[named] = candidate_id, tree
        return named

    def successor(self, verdict: Verdict) -> InFlightTree | None:
        """Returns what the target verifies next; None when nothing was pushed for the verdict."""
        found = self._pushed.get(condition_key(verdict.condition))
        return None if found is None else InFlightTree(*found)


def drop_unknown_tokens(tree: TokenTree, vocab_size: int) -> TokenTree:
    """Returns the tree without tokens outside `[0, vocab_size)` and without their descendants.

    A draft's vocabulary may be padded further than its target's.
    """
    if not tree.token_ids or max(tree.token_ids) < vocab_size:
        return tree
    kept: set[int | None] = {None}
    nodes = list[int]()
    for node, parent in enumerate(tree.parent_indices):
        if parent in kept and tree.token_ids[node] < vocab_size:
            kept.add(node)
            nodes.append(node)
    return tree.only(nodes)


class SequenceKey(NamedTuple):
    """Names a sequence among those of every target this worker serves. Hashed many times a round.

    Attributes:
        link: the attachment it came by; links are numbered by the engine and never reused.
        sequence_id: unique on that link.
    """

    link: int
    sequence_id: int


@dataclass(slots=True, eq=False)
class DraftSequence:
    """Committed tokens of one sequence; owned by the engine thread.

    Attributes:
        token_ids: prompt and output committed so far. Only ever extended.
        round: round the next candidate is for.
        mirrors_noise: the target draws with noise keyed by (seed, position, token), so the draft
            adds the same noise before it picks candidates.
        draws_chains: the target verifies chains by the distributions that their tokens were drawn
            from.
        vocab_size: trees may hold only tokens below it.
        max_nodes: most nodes of a tree the target takes.
        tree_request: what the target requests of the next tree.
        max_conditional: most candidates the target keeps for the verdicts of a round.
        in_flight: the tree under verification; None when the target has none of this draft.
        shape: of a probe; overrides the engine's shape.
        is_probe: asked for one tree by `ProposeTree`: answered however long it takes, and never
            at the cost of another sequence.
        cache_salt: the sequence's cache entries are for sequences with the same salt only.
        draft_s: time the drafter has spent on forwards that included this sequence, in seconds.
    """

    key: SequenceKey
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    round: int
    mirrors_noise: bool
    vocab_size: int
    max_nodes: int
    shape: TreeShape | None = None
    is_probe: bool = False
    draws_chains: bool = False
    cache_salt: str = ""
    draft_s: float = 0.0
    tree_request: TreeRequest = ANY_TREE
    max_conditional: int = 0
    in_flight: InFlightTree | None = None
    _candidate_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def pass_sampling(self) -> SamplingParams:
        """What a pass on the device scores its tokens by: the request's own sampling, or greedy
        where that leaves the target one token, whatever the noise is."""
        sampling = self.sampling
        return replace(sampling, temperature=0.0) if sampling.top_k == 1 else sampling

    @property
    def grows_whole(self) -> bool:
        """Whether the kind of its sampling is all that a pass needs to score what the request asks
        for: greedily, or by the coupled rule without penalties and bias, and without cuts that
        leave a few tokens to draw from."""
        sampling = self.pass_sampling
        cuts_deep = (
            0 < sampling.top_k < _FEWEST_TOP_K
            or sampling.top_p < _LEAST_TOP_P
            or sampling.min_p > _MOST_MIN_P
        )
        is_coupled = self.mirrors_noise and not cuts_deep
        is_of_a_kind = not sampling.shapes_logits and (sampling.is_greedy or is_coupled)
        # One tree of a shape that somebody has made up is not worth a graph.
        return is_of_a_kind and not self.draws_chains and self.shape is None

    def new_candidate_id(self) -> int:
        """Returns an id that no candidate of the sequence had before."""
        return next(self._candidate_ids)
