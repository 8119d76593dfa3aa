"""What a sequence does in a round that nothing was pushed ahead for. No torch.

The rungs: the candidate that matches the verdict; a tree of the target's own; waiting for the
draft, up to the budget; a plain token. A sequence waits for the draft's tree if that promises more
tokens a second than what the target can do at once, and now and then to find out.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.target.control.averages import Average
from services.target.control.kept import narrowed
from services.target.fallback import NgramFallback
from services.target.sequence import Sequence
from shared.tokens import EMPTY_TREE, TokenTree

STEP_SMOOTHING = 0.05
ROUNDS_A_PROBE = 16
FEWEST_ROUNDS = 8
"""Of a draft's trees until it is judged by what they bring: of one or two rounds, either may have
had bad luck."""
PROBE_COST = 0.04
"""Share of the time that finding out may cost."""


@dataclass(slots=True)
class OwnTrees:
    """Rounds that verified a tree of the target's own.

    Attributes:
        num_committed: tokens that they committed, bonus included.
    """

    num_rounds: int = 0
    num_committed: int = 0


class MissLadder:
    """Chooses the rung, a sequence and round at a time, by what steps and trees were worth.

    Args:
        fallback: the source of the target's own trees; None for none.
        waits_always: where the target has no tree, as long as the draft's timeout says; else only
            while that promises more than plain tokens.
    """

    def __init__(self, fallback: NgramFallback | None = None, *, waits_always: bool = True) -> None:
        self._fallback = fallback
        self._waits_always = waits_always
        self._step_s: float | None = None
        self._drafted_tokens = Average()
        self._local_tokens = Average()
        self._num_preferred = 0
        self._own = OwnTrees()

    @property
    def has_fallback(self) -> bool:
        return self._fallback is not None

    @property
    def may_pause(self) -> bool:
        """Whether a draft that is not worth waiting for may be asked for nothing for a while."""
        return not (self._waits_always or self.has_fallback)

    def tree(self, sequence: Sequence) -> TokenTree:
        """Returns the target's own tree for a round that no draft has one for, as much of it as the
        request allows, perhaps nothing."""
        if sequence.request.speculation_disabled:
            return EMPTY_TREE
        tree = EMPTY_TREE if sequence.prediction is None else sequence.prediction.tree()
        if self._fallback is not None and not tree.token_ids:
            tree = self._fallback.tree(sequence)
        allowed = narrowed(tree, sequence.request.num_draft_tokens)
        return tree if allowed is None else allowed.tree

    def waits(self, sequence: Sequence, wait_s: float | None, answer_rate: float = 1.0) -> bool:
        """Whether to wait for the draft's tree rather than step with the target's own, or none.

        Args:
            wait_s: how long the draft is usually waited for; None when that is not known.
            answer_rate: how often that brings a tree, rather than a plain token.
        """
        has_tree = bool(self.tree(sequence).token_ids)
        if self._drafted_tokens.num_samples < FEWEST_ROUNDS or wait_s is None:
            return True
        if not has_tree and (self._waits_always or self._step_s is None):
            return True
        if self._step_s is None or (has_tree and not self._local_tokens.num_samples):
            return False  # its own trees have not been tried yet
        local_tokens = self._local_tokens.value if has_tree else 1.0
        drafted_tokens = 1.0 + answer_rate * (self._drafted_tokens.value - 1.0)
        drafted_rate = drafted_tokens / (wait_s + self._step_s)
        if drafted_rate >= local_tokens / self._step_s:
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

    def counted(self, num_committed: int, *, is_local: bool) -> None:
        """A round with a tree was committed, the target's own or a draft's."""
        (self._local_tokens if is_local else self._drafted_tokens).add(num_committed)
        # Else it is that of a draft that has left since the step began.
        if is_local and self.has_fallback:
            self._own.num_rounds += 1
            self._own.num_committed += num_committed

    def take_own(self) -> OwnTrees:
        """Returns what trees of the target's own did since the last call."""
        own, self._own = self._own, OwnTrees()
        return own

    def forget(self, sequence: Sequence) -> None:
        """Lets go of a sequence that has ended."""
        if self._fallback is not None:
            self._fallback.forget(sequence)
