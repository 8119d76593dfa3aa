"""The interface of every drafter.

A drafter keeps its own state per sequence (KV pages, cursors, hidden states) and is called
on the engine thread only. The engine owns the committed tokens: it extends
`DraftSequence.token_ids` and then calls `commit`.

Cheap calls, without a forward: `open`, `commit`, `add_features`, `backlog`, `reserve`, `close`,
`is_prepared`. Calls that compute: `catch_up`, `propose` and `prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.draft.events import FeatureRows, MappedHeadLimits
from services.draft.likely_verdicts import RankShares
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.leases import KvLeases
from shared.tokens import Condition, TokenTree, TreeShape, Verdict

if TYPE_CHECKING:
    from shared.models.heads.feature_spec import FeatureSpec
    from shared.runtime.tree_model import RoundModel


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree for a sequence's current round or, with a condition, for the round after it.

    Attributes:
        shape: the shape that the tree was grown in. It may differ from the one requested now.
    """

    sequence: DraftSequence
    tree: TokenTree
    condition: Condition | None = None
    shape: TreeShape | None = None


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """Limits and requirements of a drafter.

    Attributes:
        vocab_size: token ids must be below it; None accepts any token.
        max_context_tokens: tokens that one forward can attend to; longer sequences are windowed.
            None is unbounded.
        feature_spec: hidden states that the drafter reads; None for token-level drafters.
        mapped_head: sizes of the head that a target's rounds can share; None where there is none.
        num_ready_tokens: a sequence with at most this backlog catches up in its proposal. A round
            commits at most 33 tokens, so with 64 a sequence that was ready stays ready.
    """

    vocab_size: int | None = None
    max_context_tokens: int | None = None
    feature_spec: FeatureSpec | None = None
    mapped_head: MappedHeadLimits | None = None
    num_ready_tokens: int = 64


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """A tree under verification in the current round, for whose verdicts trees are to be prepared.

    Attributes:
        shape: shape of the trees to prepare.
        budget: most verdicts to prepare for.
    """

    sequence: DraftSequence
    tree: TokenTree
    shape: TreeShape
    budget: int


class Lookahead(Protocol):
    """Prepares trees for the possible verdicts on a tree that is being verified.

    Attributes:
        budget: most verdicts per sequence and round. Proposals keep enough continuations of each
            node to choose that many. Set between forwards.
    """

    budget: int

    @property
    def has_work(self) -> bool:
        """Whether `advance` has something to compute."""

    def begin(self, verified: VerifiedTree) -> None:
        """Prepares for the verdicts on a tree. Computes nothing."""

    def resume(self, sequence: DraftSequence) -> bool:
        """Continues the tree for the current round from what was computed ahead; `advance` will
        return that tree, without a condition. False when nothing was computed for it."""
        return False

    def advance(self) -> list[Proposal]:
        """Computes one forward; returns the proposals that are complete, likeliest first."""


class OneStepLookahead(Lookahead):
    """Prepares for all verdicts on a tree at once. A new tree costs no more than a resumed one."""

    def __init__(self) -> None:
        self.budget = 0
        self._verified: dict[SequenceKey, VerifiedTree] = {}
        self._shares = RankShares()

    @property
    def has_work(self) -> bool:
        return bool(self._verified)

    def begin(self, verified: VerifiedTree) -> None:
        self._verified[verified.sequence.key] = verified

    def drop(self, sequence: DraftSequence) -> None:
        """Forgets a sequence: its verdict has arrived, or it ended."""
        self._verified.pop(sequence.key, None)

    def _next(self) -> VerifiedTree:
        """Removes and returns the oldest tree to prepare for."""
        return self._verified.pop(next(iter(self._verified)))


class Drafter(Protocol):
    """Proposes token trees that continue committed tokens. Methods with a body are optional, for
    drafters that capture graphs, have a prefix cache, read features or share a head."""

    @property
    def limits(self) -> DrafterLimits: ...

    @property
    def lookahead(self) -> Lookahead | None:
        """None for drafters that cannot draft ahead."""

    def open(self, sequence: DraftSequence) -> None:
        """Opens a sequence."""

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        """Applies a round's result. `sequence.token_ids` already ends with the committed tokens.

        The verified tree need not be the one this drafter proposed last: it may come from another
        source, or there was none.
        """

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        """Adds features of committed positions, in the order of positions and without gaps from
        the first row on. Rows that the drafter already has are ignored. A drafter that reads tokens
        alone needs none."""
        return

    def backlog(self, sequence: DraftSequence) -> int:
        """Returns how many committed tokens are not yet computed, the last token included.

        A drafter that reads features counts only tokens whose features are here.
        """

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        """Reserves memory for the backlog and one tree.

        False, with nothing changed, when memory does not suffice.
        """

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
        """Computes up to `max_tokens` committed tokens of reserved sequences, in the order given.

        Returns the number computed; 0 means that the drafter waits for features.
        """

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Proposes for each of the reserved sequences, after computing the rest of its backlog.

        At most one unconditional tree a sequence, empty when there is nothing to propose.
        """

    def close(self, sequence: DraftSequence) -> None:
        """Frees the sequence's state."""

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        """Whether proposals of this shape for up to `num_sequences` need no one-time work."""
        return True

    def prepare(self, shape: TreeShape, num_sequences: int | None) -> bool:
        """Does one piece of one-time work for proposals of this shape, such as capturing a graph;
        returns whether some was left to do.

        Args:
            num_sequences: as for `is_prepared`; None is any number, used while the draft is idle.
        """
        return False

    def share_head(self) -> SharedHead | None:
        """Shares the model and most of the free pages with a target's rounds, permanently; None
        where the model takes part in no rounds."""
        return None

    def flush_prefix_cache(self) -> int:
        """Drops cached state that no sequence uses; returns the pages freed."""
        return 0

    def retire_prefix_cache(self) -> None:
        """Call after the weights changed: open sequences keep their state, and later sequences do
        not share it."""
        return

    def gauges(self) -> Mapping[str, float]:
        """Returns live figures for operators, named in lower_snake_case."""

    def check(self) -> None:
        """Asserts the drafter's invariants."""


_SHARED_EIGHTHS = 7
"""Eighths of the free pages that a target's rounds get."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedHead:
    """A draft head or a language model for a target's rounds, with KV pages for them alone.

    Attributes:
        pages: pages of the model's pool, leased permanently.
        max_context_tokens: longest sequence that needs no window.
    """

    model: RoundModel
    pages: tuple[int, ...]
    max_context_tokens: int

    @classmethod
    def leased(cls, model: RoundModel, leases: KvLeases, *, max_context_tokens: int) -> SharedHead:
        """Leases most of the free pages; the drafter keeps some for requests without a lane."""
        lease = leases.open(())
        num_shared = leases.num_free_pages * _SHARED_EIGHTHS // 8
        leases.grow(lease, num_shared * leases.page_size)
        return cls(model, tuple(lease.pages), max_context_tokens)
