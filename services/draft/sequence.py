"""A sequence as the draft sees it: its committed tokens, its round and its in-flight tree."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shared.candidate_columns import ConditionKey, condition_key
from shared.tokens import ANY_TREE, SamplingParams, TokenTree, TreeRequest, TreeShape, Verdict

# A pass scores tokens without top-k, top-p and min-p. With cuts deeper than these, too many of the
# tokens it proposes are among those that the target cuts away.
_MIN_TOP_K = 4
_MIN_TOP_P = 0.5
_MAX_MIN_P = 0.5


@dataclass(slots=True)
class InFlightTree:
    """A candidate that was pushed and whose verdict has not arrived.

    Target and draft name it by `candidate_id`. Both choose the next tree by the verdict on this
    one, so they agree on the next tree even if a candidate arrived after the verdict.
    """

    candidate_id: int
    tree: TokenTree
    _pushed: dict[ConditionKey, tuple[int, TokenTree]] = field(default_factory=dict)

    def push(self, condition: ConditionKey, candidate_id: int, tree: TokenTree) -> ConditionKey:
        """Records a candidate for a verdict; returns the condition with this tree's id."""
        node_index, bonus_token_id, _ = condition
        named_condition = node_index, bonus_token_id, self.candidate_id
        self._pushed[named_condition] = candidate_id, tree
        return named_condition

    def successor(self, verdict: Verdict) -> InFlightTree | None:
        """Returns the tree that was pushed for a verdict, which the target verifies next."""
        pushed = self._pushed.get(condition_key(verdict.condition))
        return None if pushed is None else InFlightTree(*pushed)


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
        link: number of the attachment; the engine numbers links and never reuses a number.
        sequence_id: unique on that link.
    """

    link: int
    sequence_id: int


@dataclass(slots=True, eq=False)
class DraftSequence:
    """Committed tokens of one sequence; owned by the engine thread.

    Attributes:
        token_ids: prompt and output committed so far; only extended, never changed.
        round: round the next candidate is for.
        mirrors_noise: the target draws with noise keyed by (seed, position, token), so the draft
            adds the same noise before it picks candidates.
        draws_chains: the target verifies chains by the distributions that their tokens were drawn
            from.
        vocab_size: trees may hold only tokens below this id.
        max_nodes: most nodes of a tree that the target accepts.
        tree_request: what the target requests of the next tree.
        max_conditional: most candidates the target keeps for the verdicts of a round.
        in_flight: the tree under verification; None when the target has no tree of this draft.
        shape: tree shape of a probe; overrides the engine's shape.
        is_probe: whether it is a `ProposeTree` request for one tree. A probe is answered however
            long that takes, and never evicts another sequence.
        cache_salt: only sequences with the same salt share the sequence's prefix cache entries.
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
        """The sampling by which a pass on the device scores tokens: the request's own, or greedy
        for top-k 1, which leaves the target one token whatever the noise is."""
        sampling = self.sampling
        return replace(sampling, temperature=0.0) if sampling.top_k == 1 else sampling

    @property
    def grows_whole(self) -> bool:
        """Whether a pass on the device can grow the sequence's whole tree. It can where the request
        has no penalties or bias and is either greedy, or coupled without cuts that leave few tokens
        to draw from: then the pass needs only the kind of sampling to score tokens."""
        sampling = self.pass_sampling
        cuts_deep = (
            0 < sampling.top_k < _MIN_TOP_K
            or sampling.top_p < _MIN_TOP_P
            or sampling.min_p > _MAX_MIN_P
        )
        is_coupled = self.mirrors_noise and not cuts_deep
        is_simple = not sampling.shapes_logits and (sampling.is_greedy or is_coupled)
        # One tree of a probe's own shape is not worth capturing a graph.
        return is_simple and not self.draws_chains and self.shape is None

    def new_candidate_id(self) -> int:
        """Returns an id that no earlier candidate of the sequence had."""
        return next(self._candidate_ids)
