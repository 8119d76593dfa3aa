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
    """A tree for a sequence's current round, or with a condition for the round after it.

    Attributes:
        shape: that it was grown in, if it may have been begun while another one was wanted.
    """

    sequence: DraftSequence
    tree: TokenTree
    condition: Condition | None = None
    shape: TreeShape | None = None


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """Limits and requirements of a drafter.

    Attributes:
        vocab_size: tokens it knows; None takes any.
        max_context_tokens: tokens one forward can look back on; longer sequences are windowed.
            None is unbounded.
        feature_spec: hidden states it reads; None for token-level drafters.
        mapped_head: of a head that it lends to rounds of a target; None where it lends none.
        num_ready_tokens: a sequence at most this far behind catches up in its proposal. A round
            commits at most 33 tokens, so with 64 a sequence that was ready stays ready.
    """

    vocab_size: int | None = None
    max_context_tokens: int | None = None
    feature_spec: FeatureSpec | None = None
    mapped_head: MappedHeadLimits | None = None
    num_ready_tokens: int = 64


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """A tree that is verified in the current round, whose verdicts are yet to be prepared for.

    Attributes:
        shape: of the trees to prepare.
        budget: verdicts to prepare for.
    """

    sequence: DraftSequence
    tree: TokenTree
    shape: TreeShape
    budget: int


class Lookahead(Protocol):
    """Prepares trees for the verdicts on a tree that is being verified.

    Attributes:
        budget: verdicts a sequence and round; proposals keep what choosing among so many needs.
            Set between forwards.
    """

    budget: int

    @property
    def has_work(self) -> bool:
        """Whether `advance` has something to compute."""

    def begin(self, verified: VerifiedTree) -> None:
        """Prepares for the verdicts on a tree. Computes nothing."""

    def resume(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        """Starts on the tree for the current round from what was computed ahead; `advance` will
        return it, without a condition. False when there is nothing to go on from."""
        return False

    def advance(self) -> list[Proposal]:
        """Computes one forward; returns the proposals that are complete, likeliest first."""


class OneStepLookahead(Lookahead):
    """Prepares for all verdicts on a tree at once: a new tree costs no more than an old one, so
    there is nothing to resume from."""

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
        """Forgets a sequence: a verdict fell, or it ended."""
        self._verified.pop(sequence.key, None)

    def _next(self) -> VerifiedTree:
        """Takes the oldest of those trees."""
        return self._verified.pop(next(iter(self._verified)))


class Drafter(Protocol):
    """Proposes token trees that continue committed tokens. One that has nothing to prepare, shares
    nothing between sequences or reads no features leaves those methods as they are."""

    @property
    def limits(self) -> DrafterLimits: ...

    @property
    def lookahead(self) -> Lookahead | None:
        """None for drafters that cannot draft ahead."""

    def open(self, sequence: DraftSequence) -> None:
        """Takes a sequence on."""

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        """Takes a round's result. `sequence.token_ids` already ends with the committed tokens.

        The verified tree need not be the one this drafter proposed last: another source may have
        supplied it, or none.
        """

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        """Takes features of committed positions, in the order of positions and without gaps from
        the first row on. Rows it knows already are nothing new, and a drafter that reads tokens
        alone needs none."""
        return

    def backlog(self, sequence: DraftSequence) -> int:
        """Returns how many committed tokens the drafter has yet to take in, the last included.

        A drafter that reads features counts those it has the features of.
        """

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        """Makes room for the backlog and one tree.

        False, with nothing changed, when memory does not suffice.
        """

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
        """Takes in up to `max_tokens` committed tokens of reserved sequences, in the order given.

        Returns how many; 0 says that it waits for features.
        """

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Proposes for each of the reserved sequences, after taking in what is left of its backlog.

        At most one unconditional tree a sequence, empty when there is nothing to offer.
        """

    def close(self, sequence: DraftSequence) -> None:
        """Frees the sequence's state."""

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        """Whether proposals of this shape for so many sequences, or fewer, wait for nothing that is
        done once."""
        return True

    def prepare(self, shape: TreeShape, num_sequences: int | None) -> bool:
        """Does one thing that a later proposal of this shape would otherwise wait for; returns
        whether something was left to do.

        Args:
            num_sequences: what `is_prepared` asks for; None is any number, while there is nothing
                else to do.
        """
        return False

    def share_head(self) -> SharedHead | None:
        """Lends the model and most of the free pages to rounds of a target, for good; None where no
        round takes it."""
        return None

    def flush_prefix_cache(self) -> int:
        """Drops cached state no sequence uses; returns the pages freed."""
        return 0

    def retire_prefix_cache(self) -> None:
        """Other weights: sequences go on with the state they have, and none to come shares it."""
        return

    def gauges(self) -> Mapping[str, float]:
        """Returns live figures for operators, named in lower_snake_case."""

    def check(self) -> None:
        """Asserts the drafter's invariants."""


# A draft model with KV pages that its drafter keeps off, for the rounds of a target.

_SHARED_EIGHTHS = 7


@dataclass(frozen=True, slots=True, eq=False)
class SharedHead:
    """A draft head, or a language model, as rounds use it.

    Attributes:
        pages: of the model's pool, for good.
        max_context_tokens: longest sequence that needs no window.
    """

    model: RoundModel
    pages: tuple[int, ...]
    max_context_tokens: int

    @classmethod
    def of_most(cls, model: RoundModel, leases: KvLeases, *, max_context_tokens: int) -> SharedHead:
        """Takes most of the free pages; the drafter keeps some for requests that have no lane."""
        lease = leases.open(())
        num_shared = leases.num_free_pages * _SHARED_EIGHTHS // 8
        leases.grow(lease, num_shared * leases.page_size)
        return cls(model, tuple(lease.pages), max_context_tokens)
