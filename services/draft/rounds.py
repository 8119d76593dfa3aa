"""In which order the draft works off what it owes. No torch, no threads, no grpc.

A `step` is one proposal batch over every sequence that is due, whatever target it came from, and
then one chunk of catching up. So a long prompt delays the others by one chunk, never by the whole
prompt. A sequence more than a chunk behind is answered with an empty tree at once: its target
would only wait in vain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from services.draft.drafters.drafter import Drafter, Proposal
from services.draft.events import CandidatesReady, Output, ProbeDone
from services.draft.roster import Roster
from services.draft.sequence import DraftSequence, SequenceKey
from shared.tokens import EMPTY_TREE, Candidate, TokenTree, TreeShape

NUM_READY_TOKENS = 64
"""A sequence at most this far behind catches up in the first forward of its proposal. A round
commits at most 33 tokens, so a sequence that was ready stays ready."""


class Rounds:
    """Plans the drafter's work over the sequences of a roster.

    Attributes:
        shape: bounds of every tree whose sequence does not bring its own; may be replaced
            between steps.
    """

    def __init__(
        self,
        roster: Roster,
        drafter: Drafter,
        shape: TreeShape,
        *,
        chunk_tokens: int,
        deliver: Callable[[Output], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.shape = shape
        self._roster = roster
        self._drafter = drafter
        self._chunk_tokens = chunk_tokens
        self._deliver = deliver
        self._clock = clock

    def step(self) -> bool:
        """Answers what can be answered, then catches up by a chunk.

        True when another step has work without waiting for an event.
        """
        due = list(self._roster.due.values())
        ready = [sequence for sequence in due if self._is_ready(sequence)]
        late = [sequence for sequence in due if self._is_late(sequence)]
        self._answer([*(Proposal(s, EMPTY_TREE) for s in late), *self._propose(ready)])
        return self._catch_up() > 0

    def _is_ready(self, sequence: DraftSequence) -> bool:
        return self._drafter.backlog(sequence) <= NUM_READY_TOKENS

    def _is_late(self, sequence: DraftSequence) -> bool:
        return not sequence.is_probe and self._drafter.backlog(sequence) > self._chunk_tokens

    def _propose(self, ready: Sequence[DraftSequence]) -> list[Proposal]:
        by_shape: dict[TreeShape, list[DraftSequence]] = {}
        for sequence in ready:
            by_shape.setdefault(self._shape_for(sequence), []).append(sequence)
        proposals: list[Proposal] = []
        for shape, sequences in by_shape.items():
            batch = self._with_room(sequences)
            start_s = self._clock()
            proposals += self._drafter.propose(batch, shape) if batch else []
            self._charge(batch, self._clock() - start_s)
        return proposals

    def _catch_up(self) -> int:
        """Takes in a chunk of the oldest backlogs; returns its tokens."""
        batch: list[DraftSequence] = []
        num_tokens = 0
        for sequence in self._roster.behind(NUM_READY_TOKENS):
            if num_tokens >= self._chunk_tokens:
                break
            batch.append(sequence)
            num_tokens += self._drafter.backlog(sequence)
        batch = self._with_room(batch)
        start_s = self._clock()
        num_taken = self._drafter.catch_up(batch, self._chunk_tokens) if batch else 0
        self._charge(batch, self._clock() - start_s)
        return num_taken

    def _with_room(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        """Reserves memory for each, releasing the least recently used others where it is short;
        returns those that got it."""
        roomy: list[DraftSequence] = []
        for sequence in sequences:
            spared = {sequence.key, *(other.key for other in roomy)}
            if self._roster.holds(sequence) and self._make_room(sequence, spared):
                roomy.append(sequence)
        return roomy

    def _make_room(self, sequence: DraftSequence, spared: set[SequenceKey]) -> bool:
        shape = self._shape_for(sequence)
        while not self._drafter.reserve(sequence, shape):
            victim = self._roster.least_recently_used(spared=spared)
            if victim is None or sequence.is_probe:
                self._roster.release(sequence)
                return False
            self._roster.release(victim)
        return True

    def _charge(self, batch: Iterable[DraftSequence], elapsed_s: float) -> None:
        for sequence in batch:
            sequence.draft_s += elapsed_s

    def _shape_for(self, sequence: DraftSequence) -> TreeShape:
        shape = sequence.shape or self.shape
        num_draft_tokens = min(shape.num_draft_tokens, sequence.max_nodes + 1)
        return replace(shape, num_draft_tokens=num_draft_tokens)

    def _answer(self, proposals: Iterable[Proposal]) -> None:
        """Delivers one message a link."""
        by_link: dict[int, list[Candidate]] = {}
        for proposal in proposals:
            sequence = proposal.sequence
            if not self._roster.holds(sequence):
                continue
            tree = drop_unknown_tokens(proposal.tree, sequence.vocab_size)
            self._roster.due.pop(sequence.key, None)
            if sequence.is_probe:
                self._roster.close(sequence.key)
                self._deliver(ProbeDone(sequence.key.link, tree, sequence.draft_s))
                continue
            by_link.setdefault(sequence.key.link, []).append(
                Candidate(
                    sequence_id=sequence.key.sequence_id,
                    round=sequence.round,
                    committed_token_count=sequence.num_tokens,
                    tree=tree,
                    condition=proposal.condition,
                )
            )
        for link, candidates in by_link.items():
            self._deliver(CandidatesReady(link, tuple(candidates)))


def drop_unknown_tokens(tree: TokenTree, vocab_size: int) -> TokenTree:
    """Returns the tree without tokens outside `[0, vocab_size)` and without their descendants.

    A draft's vocabulary may be padded further than its target's.
    """
    if all(token < vocab_size for token in tree.token_ids):
        return tree
    kept: dict[int | None, int | None] = {None: None}
    for node, parent in enumerate(tree.parent_indices):
        if parent in kept and tree.token_ids[node] < vocab_size:
            kept[node] = len(kept) - 1
    nodes = [node for node in kept if node is not None]
    return TokenTree(
        tuple(tree.token_ids[node] for node in nodes),
        tuple(kept[tree.parent_indices[node]] for node in nodes),
        tuple(tree.log_probs[node] for node in nodes) if tree.log_probs else (),
    )
