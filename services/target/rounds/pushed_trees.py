"""The trees for the next round on the device, chosen from those that drafts pushed."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from services.target.drafts.assignments import Assignment
from services.target.drafts.attachments import Attachments
from services.target.rounds.round_steps import LaunchedRound
from services.target.scheduler import ScheduledSequence, pruned
from services.target.sequence import Sequence
from services.target.step_report import Clock
from services.target.verifier import Decision
from shared.runtime.round_selection import Ending, PreparedTree
from shared.runtime.round_state import SequenceRound
from shared.tokens import EMPTY_TREE, Candidate, TokenTree


def conditional_trees(
    sequence: Sequence, verified: TokenTree, candidates: SequenceOf[Candidate]
) -> tuple[tuple[Candidate, PreparedTree], ...]:
    """Returns the candidates for possible verdicts on a tree that is being verified, with their
    trees as the device takes them.

    Leaves out candidates for nodes that the tree does not have, and for verdicts that end the
    sequence. After an empty tree there are none, because its verdict names no candidate.
    """
    if not verified.token_ids:
        return ()
    depths = (0, *verified.depths)
    trees: list[tuple[Candidate, PreparedTree]] = []
    for candidate in candidates:
        assert candidate.condition is not None
        node, bonus = candidate.condition.node_index, candidate.condition.bonus_token_id
        row = 0 if node is None else node + 1
        if row >= len(depths) or bonus in sequence.stop_token_ids:
            continue
        num_committed = depths[row] + 1
        if num_committed < sequence.num_remaining:
            num_tokens = len(sequence.token_ids) + num_committed
            trees.append((candidate, PreparedTree(num_tokens, candidate.tree, Ending(row, bonus))))
    return tuple(trees)


def as_step(
    sequence: Sequence, tree: TokenTree, result: SequenceRound
) -> tuple[ScheduledSequence, Decision]:
    """Returns the result of a round for a sequence in the form of a planned step, without the nodes
    and tokens beyond the end of the output."""
    tree, nodes = pruned(tree, sequence.num_remaining - 1)
    token_ids = result.token_ids[: sequence.num_remaining]
    entry = ScheduledSequence(sequence, sequence.num_computed, 1, tree, nodes, is_complete=True)
    logprobs = result.logprobs[: len(token_ids)]
    return entry, Decision(_accepted_nodes(tree, token_ids[:-1]), token_ids, logprobs)


def _accepted_nodes(tree: TokenTree, token_ids: SequenceOf[int]) -> tuple[int, ...]:
    """Returns the path of nodes with these tokens; among siblings with equal tokens the first."""
    path: list[int] = []
    nodes = enumerate(zip(tree.parent_indices, tree.token_ids, strict=True))
    for token_id in token_ids:
        # Children come after their parents, so one pass over the nodes is enough.
        wanted = (path[-1] if path else None, token_id)
        path.append(next(index for index, node in nodes if node == wanted))
    return tuple(path)


MIN_ALTERNATING = 16
"""With this many sequences or more, two rounds alternate. With fewer, a round of half of them takes
as long as one of all."""


@dataclass(slots=True, eq=False)
class NextTrees:
    """The trees prepared for the next round.

    Attributes:
        prepared: the trees of each sequence, from which the device chooses one.
        trees, offered: see `LaunchedRound`.
        hit_rates: for each sequence, the probability that it takes part.
    """

    prepared: dict[Sequence, tuple[PreparedTree, ...]] = field(default_factory=dict)
    trees: dict[int, TokenTree] = field(default_factory=dict)
    offered: dict[int, tuple[Candidate, ...]] = field(default_factory=dict)
    hit_rates: list[float] = field(default_factory=list)

    def add(self, sequence: Sequence, tree: TokenTree, *, num_tokens: int) -> None:
        """Prepares a tree that is verified after any result of the round in flight."""
        self.prepared[sequence] = (PreparedTree(num_tokens, tree),)
        self.trees[sequence.sequence_id] = tree
        self.hit_rates.append(1.0)

    @property
    def sure(self) -> tuple[Sequence, ...]:
        """The sequences that certainly take part."""
        return tuple(s for s in self.prepared if s.sequence_id in self.trees)


class TreeForecast:
    """Collects the trees for the next round. Owned by the engine thread."""

    def __init__(self, attachments: Attachments, clock: Clock) -> None:
        self._assignments = attachments.assignments
        self._readiness = attachments.readiness
        self._clock = clock

    def is_any_ready(self, lanes: Iterable[Sequence]) -> bool:
        """Whether any sequence has its tree or no draft. Called with no round in flight."""
        assignments = map(self._assignment, lanes)
        return any(place is None or place.candidate is not None for place in assignments)

    def ready_trees(self, lanes: SequenceOf[Sequence]) -> NextTrees:
        """Returns the trees, perhaps empty, of the sequences that are ready, or no trees while
        these are held back. Called with no round in flight.

        Of many sequences only half take part. The other half follows in a round behind this one,
        and from then on drafts work for one half while the other half is verified.
        """
        trees = NextTrees()
        self._add_ready(trees, lanes, lanes)
        return trees

    def _add_ready(
        self, trees: NextTrees, lanes: SequenceOf[Sequence], free: SequenceOf[Sequence]
    ) -> None:
        """Adds the sequences of `free` that are ready, unless their trees are held back. Of those
        whose drafts responded to a verdict, adds at most half of all lanes."""
        now_s = self._clock()
        if self._readiness.hold_trees(free, now_s):
            return
        ready = [sequence for sequence in free if self._readiness.is_ready(sequence, now_s)]
        if len(lanes) >= MIN_ALTERNATING:
            responded = list(filter(self._has_response, ready))
            left_out = set(responded[-(-len(lanes) // 2) :])
            ready = [sequence for sequence in ready if sequence not in left_out]
        for sequence in ready:
            tree = self._assignments.tree(sequence)
            trees.add(sequence, tree, num_tokens=len(sequence.token_ids))

    def _has_response(self, sequence: Sequence) -> bool:
        """Whether the sequence has a tree that its draft grew in response to the last verdict."""
        assignment = self._assignment(sequence)
        return bool(assignment and assignment.candidate and not assignment.pushes_ahead)

    def is_complete(self, lanes: Iterable[Sequence], in_flight: LaunchedRound) -> bool:
        """Whether the next round depends on nothing that has yet to arrive but the results of the
        round in flight."""
        return all(self._is_complete_for(sequence, in_flight) for sequence in lanes)

    def trees_behind(self, lanes: SequenceOf[Sequence], in_flight: LaunchedRound) -> NextTrees:
        """Returns the trees for the round behind the one in flight, for the device to choose from.
        Their candidates are sealed until the verdict. Sequences that are not in the round in flight
        join as in `ready_trees`."""
        trees = NextTrees()
        self._add_ready(trees, lanes, [s for s in lanes if s.sequence_id not in in_flight.trees])
        for sequence in lanes:
            verified = in_flight.trees.get(sequence.sequence_id)
            if verified is not None and sequence.num_remaining > 1:
                self._add_conditional(sequence, verified, trees)
        return trees

    def _add_conditional(self, sequence: Sequence, verified: TokenTree, trees: NextTrees) -> None:
        """Adds the trees for possible verdicts on a sequence's tree in the round in flight."""
        assignment = self._assignment(sequence)
        if assignment is None or (assignment.is_idle and not verified.token_ids):
            # Without a tree the round commits exactly one token.
            trees.add(sequence, EMPTY_TREE, num_tokens=len(sequence.token_ids) + 1)
        elif assignment.pushes_ahead:
            pairs = conditional_trees(sequence, verified, assignment.seal())
            if pairs:
                trees.prepared[sequence] = tuple(tree for _, tree in pairs)
                trees.offered[sequence.sequence_id] = tuple(candidate for candidate, _ in pairs)
                trees.hit_rates.append(assignment.attachment.outcomes.hit_rate)

    def _is_complete_for(self, sequence: Sequence, in_flight: LaunchedRound) -> bool:
        verified = in_flight.trees.get(sequence.sequence_id)
        if verified is None or sequence.num_remaining == 1:
            return True
        assignment = self._assignment(sequence)
        if assignment is None or assignment.is_idle:
            return not verified.token_ids
        if not assignment.pushes_ahead:
            # The draft only responds to verdicts. Its response is waited for after the round,
            # unless the draft is silent or has to read a prompt first.
            return not (assignment.attachment.timeout.is_cold or assignment.is_excused)
        return assignment.has_pushed

    def _assignment(self, sequence: Sequence) -> Assignment | None:
        return self._assignments.get(sequence.sequence_id)
