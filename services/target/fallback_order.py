"""The fallback order of a sequence whose tree has not arrived. No torch.

In order: verify the candidate that matches the verdict; verify an n-gram tree of the target; wait
for the draft's tree until its timeout; take a plain step. A sequence waits if the draft's tree
promises more tokens a second than the alternative, and in a probe now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.target.control.averages import Average
from services.target.control.kept import narrowed
from services.target.fallback import NgramFallback
from services.target.sequence import Sequence
from shared.tokens import EMPTY_TREE, TokenTree

STEP_SMOOTHING = 0.05
ROUND_SMOOTHING = 0.1
ROUNDS_A_PROBE = 16
FEWEST_ROUNDS = 8
"""Rounds with trees before a draft is judged by their tokens; fewer may be bad luck."""
PROBE_COST = 0.04
"""Share of the time that probes may cost."""


@dataclass(slots=True)
class OwnTrees:
    """Rounds that verified an n-gram tree of the target.

    Attributes:
        num_committed: tokens of these rounds, bonus included.
    """

    num_rounds: int = 0
    num_committed: int = 0


class FallbackOrder:
    """Chooses for each sequence and round, by measured step times and acceptance.

    Args:
        fallback: the source of n-gram trees; None without.
        waits_always: without an n-gram tree, wait until the draft's timeout; else only if that
            promises more tokens a second than plain steps.
    """

    def __init__(self, fallback: NgramFallback | None = None, *, waits_always: bool = True) -> None:
        self._fallback = fallback
        self._waits_always = waits_always
        self._step_s: float | None = None
        self._drafted_tokens = Average()
        self._local_tokens = Average()
        self._num_preferred = 0
        # By the power of two of the sequences.
        self._plain_s: dict[int, Average] = {}
        self._round_s: float | None = None
        self._own = OwnTrees()

    @property
    def has_fallback(self) -> bool:
        return self._fallback is not None

    @property
    def may_pause(self) -> bool:
        """Whether a draft that is not worth waiting for may get a backoff."""
        return not (self._waits_always or self.has_fallback)

    def tree(self, sequence: Sequence) -> TokenTree:
        """Returns the target's tree for a round without a draft's: of the request's prediction, or
        by n-grams; cut to what the request allows, perhaps empty."""
        if sequence.request.speculation_disabled:
            return EMPTY_TREE
        tree = EMPTY_TREE if sequence.prediction is None else sequence.prediction.tree()
        if self._fallback is not None and not tree.token_ids:
            tree = self._fallback.tree(sequence)
        allowed = narrowed(tree, sequence.request.num_draft_tokens)
        return tree if allowed is None else allowed.tree

    def waits(
        self,
        sequence: Sequence,
        wait_s: float | None,
        answer_rate: float = 1.0,
        *,
        num_sequences: int = 1,
    ) -> bool:
        """Whether to wait for the draft's tree rather than step with an n-gram tree or none.

        Args:
            wait_s: usual wait for the draft; None while unknown.
            answer_rate: share of these waits that bring a tree.
            num_sequences: that the draft has.
        """
        has_tree = bool(self.tree(sequence).token_ids)
        if self._drafted_tokens.num_samples < FEWEST_ROUNDS or wait_s is None:
            return True
        if not has_tree and (self._waits_always or self._step_s is None):
            return True
        if self._step_s is None or (has_tree and not self._local_tokens.num_samples):
            return False  # n-gram trees have not been tried yet
        local_tokens = self._local_tokens.value if has_tree else 1.0
        drafted_tokens = 1.0 + answer_rate * (self._drafted_tokens.value - 1.0)
        plain = None if has_tree else self._plain_s.get(num_sequences.bit_length())
        if plain is not None and self._round_s is not None:
            pays = drafted_tokens / self._round_s >= 1.0 / plain.value
        else:
            drafted_rate = drafted_tokens / (wait_s + self._step_s)
            pays = drafted_rate >= local_tokens / self._step_s
        if pays:
            return True
        self._num_preferred += 1
        rounds_a_probe = max(ROUNDS_A_PROBE, round(wait_s / (PROBE_COST * self._step_s)))
        return self._num_preferred % rounds_a_probe == 0

    def stepped(self, duration_s: float) -> None:
        """A step was done."""
        known_s = self._step_s
        self._step_s = (
            duration_s if known_s is None else known_s + STEP_SMOOTHING * (duration_s - known_s)
        )

    def took_plain(self, round_s: float, num_sequences: int) -> None:
        """A round that waited for no tree took so long, from one verdict to the next.

        Args:
            num_sequences: that the draft has.
        """
        self._plain_s.setdefault(num_sequences.bit_length(), Average()).add(round_s)

    def took(self, round_s: float) -> None:
        """A round with a draft's tree took so long, from one verdict to the next."""
        known_s = self._round_s
        self._round_s = (
            round_s if known_s is None else known_s + ROUND_SMOOTHING * (round_s - known_s)
        )

    def doubt(self) -> None:
        """A trial begins: rounds may take another time than before the backoff."""
        self._round_s = None

    def counted(self, num_committed: int, *, is_local: bool) -> None:
        """A round with a tree was committed: an n-gram tree (`is_local`) or a draft's."""
        (self._local_tokens if is_local else self._drafted_tokens).add(num_committed)
        # Without a fallback the tree is of a draft that has left since the step began.
        if is_local and self.has_fallback:
            self._own.num_rounds += 1
            self._own.num_committed += num_committed

    def take_own(self) -> OwnTrees:
        """Returns what n-gram trees did since the last call."""
        own, self._own = self._own, OwnTrees()
        return own

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        if self._fallback is not None:
            self._fallback.forget(sequence)
