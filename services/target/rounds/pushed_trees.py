"""The trees that the next round on the device may verify, of those that drafts pushed."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from services.target.drafts.assignments import Assignment
from services.target.drafts.attachments import Attachments
from services.target.draw import Decision
from services.target.rounds.round_steps import LaunchedRound
from services.target.sequence import Sequence
from services.target.step_plan import ScheduledSequence, pruned
from services.target.step_report import Clock
from shared.runtime.round_selection import Ending, PreparedTree
from shared.runtime.round_state import SequenceRound
from shared.tokens import EMPTY_TREE, Candidate, TokenTree


def conditional_trees(
    sequence: Sequence, verified: TokenTree, candidates: SequenceOf[Candidate]
) -> tuple[tuple[Candidate, PreparedTree], ...]:
    """Returns candidates for verdicts on a tree that is being verified, as the device takes them;
    not those for nodes that it does not have, or for verdicts that end the sequence, nor any behind
    an empty tree: its verdict names no candidate."""
    if not verified.token_ids:
        return ()
    depths = (0, *verified.depths)
    found: list[tuple[Candidate, PreparedTree]] = []
    for each in candidates:
        assert each.condition is not None
        node, bonus = each.condition.node_index, each.condition.bonus_token_id
        row = 0 if node is None else node + 1
        if row >= len(depths) or bonus in sequence.stop_token_ids:
            continue
        num_committed = depths[row] + 1
        if num_committed < sequence.num_remaining:
            num_tokens = len(sequence.token_ids) + num_committed
            found.append((each, PreparedTree(num_tokens, each.tree, Ending(row, bonus))))
    return tuple(found)


def as_step(
    sequence: Sequence, tree: TokenTree, result: SequenceRound
) -> tuple[ScheduledSequence, Decision]:
    """Returns a sequence's part of a round as if a step of the general path had done it, which
    leaves out what is beyond the end of the output."""
    tree, nodes = pruned(tree, sequence.num_remaining - 1)
    token_ids = result.token_ids[: sequence.num_remaining]
    entry = ScheduledSequence(sequence, sequence.num_computed, 1, tree, nodes, is_complete=True)
    logprobs = result.logprobs[: len(token_ids)]
    return entry, Decision(_accepted_nodes(tree, token_ids[:-1]), token_ids, logprobs)


def _accepted_nodes(tree: TokenTree, token_ids: SequenceOf[int]) -> tuple[int, ...]:
    """Returns the nodes that spell out tokens, the first one among siblings with one token."""
    path: list[int] = []
    nodes = enumerate(zip(tree.parent_indices, tree.token_ids, strict=True))
    for token_id in token_ids:
        # Children come behind their parents, so no node is looked at twice.
        wanted = (path[-1] if path else None, token_id)
        path.append(next(node for node, found in nodes if found == wanted))
    return tuple(path)


MIN_ALTERNATING = 16
"""Sequences from which on two rounds alternate; few rows take as long as half of them."""


@dataclass(slots=True, eq=False)
class NextTrees:
    """The trees prepared for the next round.

    Attributes:
        trees, offered: as of `LaunchedRound`.
        hit_rates: how likely each sequence takes part.
    """

    prepared: dict[Sequence, tuple[PreparedTree, ...]] = field(default_factory=dict)
    trees: dict[int, TokenTree] = field(default_factory=dict)
    offered: dict[int, tuple[Candidate, ...]] = field(default_factory=dict)
    hit_rates: list[float] = field(default_factory=list)

    def add(self, sequence: Sequence, tree: TokenTree, *, num_tokens: int) -> None:
        """Prepares a tree that is verified whatever the round under way ends in."""
        self.prepared[sequence] = (PreparedTree(num_tokens, tree),)
        self.trees[sequence.sequence_id] = tree
        self.hit_rates.append(1.0)

    @property
    def sure(self) -> tuple[Sequence, ...]:
        """The sequences that certainly take part."""
        return tuple(each for each in self.prepared if each.sequence_id in self.trees)


class TreeForecast:
    """Looks at what drafts have pushed. Owned by the engine thread."""

    def __init__(self, attachments: Attachments, clock: Clock) -> None:
        self._assignments = attachments.assignments
        self._readiness = attachments.readiness
        self._clock = clock

    def is_any_here(self, lanes: Iterable[Sequence]) -> bool:
        """Whether a sequence has its tree, or no draft, unless it is under way."""
        found = map(self._assignment, lanes)
        return any(each is None or each.candidate is not None for each in found)

    def of_ready(self, lanes: SequenceOf[Sequence]) -> NextTrees:
        """Returns the trees, perhaps empty, of the sequences that wait for nothing, and none while
        they had better wait for others. None of them is under way.

        Of many only half are returned: the other half follows in a round behind theirs, and from
        then on drafts work for one half while the other is verified.
        """
        trees, now_s = NextTrees(), self._clock()
        if self._readiness.gather(lanes, now_s):
            return trees
        for sequence in self._half_of(lanes, lanes, now_s):
            self._join(sequence, trees, now_s)
        return trees

    def _half_of(
        self, lanes: SequenceOf[Sequence], free: Iterable[Sequence], now_s: float
    ) -> SequenceOf[Sequence]:
        """Returns those of `free` that wait for nothing; of those with trees that drafts grew for
        a verdict that had fallen, half of all lanes at most."""
        ready = [each for each in free if self._readiness.is_ready(each, now_s)]
        if len(lanes) < MIN_ALTERNATING:
            return ready
        left = {id(each) for each in list(filter(self._is_answered, ready))[-(-len(lanes) // 2) :]}
        return [each for each in ready if id(each) not in left]

    def _is_answered(self, sequence: Sequence) -> bool:
        """Whether a tree is here that its draft grew for the verdict before."""
        assignment = self._assignment(sequence)
        return bool(assignment and assignment.candidate and not assignment.is_announced)

    def is_complete(self, lanes: Iterable[Sequence], under_way: LaunchedRound) -> bool:
        """Whether nothing is to come any more that decides on the round after this one, but its
        end."""
        return all(self._is_foreseen(each, under_way) for each in lanes)

    def after(self, lanes: SequenceOf[Sequence], under_way: LaunchedRound) -> NextTrees:
        """Returns what is prepared for the end of a round, and hands it to the device: it stays as
        it is until the verdict. Sequences that are not in that round join as in `of_ready`."""
        trees, now_s = NextTrees(), self._clock()
        others = [each for each in lanes if each.sequence_id not in under_way.trees]
        if not self._readiness.gather(others, now_s):
            for sequence in self._half_of(lanes, others, now_s):
                self._join(sequence, trees, now_s)
        for sequence in lanes:
            verified = under_way.trees.get(sequence.sequence_id)
            if verified is not None and sequence.num_remaining > 1:
                self._foresee(sequence, verified, trees)
        return trees

    def _join(self, sequence: Sequence, trees: NextTrees, now_s: float) -> None:
        """A sequence that sits out takes part in the next round if it waits for nothing."""
        if self._readiness.is_ready(sequence, now_s):
            tree = self._assignments.tree(sequence)
            trees.add(sequence, tree, num_tokens=len(sequence.token_ids))

    def _foresee(self, sequence: Sequence, verified: TokenTree, trees: NextTrees) -> None:
        """Prepares for the ends of a sequence's part of the round under way."""
        assignment = self._assignment(sequence)
        if assignment is None or (assignment.is_idle and not verified.token_ids):
            # Without a tree the round brings it one token, whichever.
            trees.add(sequence, EMPTY_TREE, num_tokens=len(sequence.token_ids) + 1)
        elif assignment.is_announced:
            found = conditional_trees(sequence, verified, assignment.seal())
            if found:
                trees.prepared[sequence] = tuple(tree for _, tree in found)
                trees.offered[sequence.sequence_id] = tuple(each for each, _ in found)
                trees.hit_rates.append(assignment.attachment.outcomes.hit_rate)

    def _is_foreseen(self, sequence: Sequence, under_way: LaunchedRound) -> bool:
        verified = under_way.trees.get(sequence.sequence_id)
        if verified is None or sequence.num_remaining == 1:
            return True
        assignment = self._assignment(sequence)
        if assignment is None or assignment.is_idle:
            return not verified.token_ids
        if not assignment.is_announced:
            # Its draft answers verdicts only, which is waited for unless the draft is silent, or
            # has to read a prompt first.
            return not (assignment.attachment.timeout.is_cold or assignment.is_excused)
        return assignment.has_pushed

    def _assignment(self, sequence: Sequence) -> Assignment | None:
        return self._assignments.get(sequence.sequence_id)
