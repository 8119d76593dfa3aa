"""What is known of one sequence at one kind of draft, and what is wanted for it. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from services.target.control.acceptance import (
    Confidences,
    LevelRates,
    expected_tokens,
)
from services.target.drafts.attachment import Attachment
from services.target.sequence import Sequence
from shared.tokens import ANY_TREE, TokenTree, TreeShape, TreeWish

POPULATION_MEMORY = 0.98
POPULATION_STRENGTH = 2.0
SEQUENCE_STRENGTH = 16.0
SMALLEST_SCALE, LARGEST_SCALE = 0.2, 1.3
UNEXPLAINED = 4.0
"""Expected hits that a sequence's own scale must outweigh."""


@dataclass(slots=True)
class Population:
    """What sequences of one kind, drafted by one kind of draft, have in common.

    Attributes:
        chains, trees: acceptance by level, of the best node alone and of all nodes.
        num_rounds: verified.
    """

    chains: LevelRates = field(
        default_factory=lambda: LevelRates.of(
            memory=POPULATION_MEMORY, strength=POPULATION_STRENGTH
        )
    )
    trees: LevelRates = field(
        default_factory=lambda: LevelRates.of(
            memory=POPULATION_MEMORY, strength=POPULATION_STRENGTH
        )
    )
    confidences: Confidences = field(default_factory=lambda: Confidences(POPULATION_MEMORY))
    num_rounds: int = 0


@dataclass(slots=True, eq=False)
class Course:
    """One sequence at one kind of draft.

    Attributes:
        attachment: the draft of that kind that has it, or had it last.
        wish: sent with the next verdict.
        asked: sent with the last one: what the current round's tree was wanted to be.
        decided: what was asked for that round.
        grown: shape of the last tree that came, where its draft said it: not the one that is wanted
            until the draft is prepared for that.
        num_decided: tokens that the last round committed, if its time tells what drafting ahead is
            worth; None where it does not.
        told_s: end of the step whose verdict asked; None before the first.
        is_untold: the last verdict has yet to go out, so that `told_s` is that of one before.
        is_heard: how long the current round's tree was waited for has been taken in.
        num_told: tokens that all sequences had committed by then.
        opened_at: number of the step in which it came to this kind of draft.
        num_probe_rounds: rounds left in which it is drafted for to find out whether it pays.
        probed_at: number of the step in which its last probe began; None before any.
        num_asked: trees asked for since it came, or since trees are wanted for it again.
        scale: how much more or less is accepted than the draft's probabilities say.
    """

    attachment: Attachment
    sequence: Sequence
    population: Population
    smoothing: float
    wish: TreeWish = ANY_TREE
    asked: TreeWish = ANY_TREE
    grown: TreeShape | None = None
    num_decided: int | None = None
    decided: TreeWish = ANY_TREE
    told_s: float | None = None
    is_untold: bool = False
    is_heard: bool = False
    num_told: int = 0
    opened_at: int = 0
    num_probe_rounds: int = 0
    probed_at: int | None = None
    num_asked: int = 0
    scale: float = 1.0
    _expected: float = 0.0
    _hits: float = 0.0
    _chains: LevelRates = field(init=False)
    _trees: LevelRates = field(init=False)

    def __post_init__(self) -> None:
        memory = 1.0 - self.smoothing
        self._chains = LevelRates.of(memory=max(memory, 0.01), strength=SEQUENCE_STRENGTH)
        self._trees = LevelRates.of(memory=max(memory, 0.01), strength=SEQUENCE_STRENGTH)

    @property
    def is_probing(self) -> bool:
        return self.num_probe_rounds > 0

    @property
    def is_catching_up(self) -> bool:
        """Whether its draft has to read a prompt, or what was committed in a pause, before it can
        draft, so that the time it takes says little about the next."""
        return self.num_asked <= 1

    @property
    def expects_nothing(self) -> bool:
        """Whether no tree is due for the current round, or a late one."""
        return self.asked.is_paused or self.is_catching_up

    @property
    def shape(self) -> TreeShape:
        """Of the current round's tree, as far as is known."""
        return self.grown or self.asked.shape or self.attachment.base_shape

    @property
    def is_obeyed(self) -> bool:
        """Whether its trees are what is wanted, as far as is known."""
        return self.grown is None or self.asked.shape in (None, self.grown)

    @property
    def tries_fan_out(self) -> bool:
        """Whether its draft prepares for another number of verdicts than is known to be best."""
        fan_out = self.attachment.fan_out
        return fan_out is not None and fan_out.is_trying

    def was_warming(self, since_s: float, now_s: float) -> bool:
        """Whether its draft prepared something at any time from then until now."""
        return self.attachment.warm_up.was_on(since_s, now_s)

    @property
    def wish_of_request(self) -> TreeWish:
        """What is wanted, with the number of verdicts to prepare for that the request set."""
        num_outcomes = self.sequence.request.num_outcomes
        if num_outcomes is None or self.wish.is_paused:
            return self.wish
        return replace(self.wish, num_outcomes=num_outcomes)

    @property
    def fixed_wish(self) -> TreeWish | None:
        """What holds whatever pays: the shape an operator pinned at the draft, or the depth that
        the request set."""
        if self.attachment.report.pinned_shape is not None:
            return ANY_TREE
        steps = self.sequence.request.num_draft_steps
        if steps is None:
            return None
        base = self.attachment.base_shape
        num_nodes = steps if base.topk == 1 else max(steps, base.max_node_count)
        return TreeWish(TreeShape(steps, base.topk, num_nodes + 1))

    @property
    def is_narrowed(self) -> bool:
        """Whether the request has only part of each tree verified."""
        return self.sequence.request.num_draft_tokens is not None

    def num_rows(self, shape: TreeShape) -> int:
        """Returns how many rows of a tree of this shape are verified at most."""
        num_rows, num_allowed = 1 + shape.max_node_count, self.sequence.request.num_draft_tokens
        return num_rows if num_allowed is None else min(num_rows, num_allowed)

    def tokens(self, shapes: SequenceOf[TreeShape]) -> list[float]:
        """Returns the tokens that a round with a tree of each shape is expected to commit."""
        deepest = max(shape.num_steps for shape in shapes)
        population = self.population
        chains = self._chains.rates(deepest, population.chains.hopeful_rates(deepest))
        trees = self._trees.rates(deepest, population.trees.hopeful_rates(deepest))
        # A tree holds the chain of its best nodes.
        trees = [max(pair) for pair in zip(chains, trees, strict=True)]
        of_chains, of_trees = expected_tokens(chains), expected_tokens(trees)
        return [
            (of_chains if shape.topk == 1 else of_trees)[
                min(shape.num_steps, self.num_rows(shape) - 1)
            ]
            for shape in shapes
        ]

    def acceptance(self, tree: TokenTree, node: int) -> float:
        """Returns the probability that a node is accepted where its parent is.

        Where the draft says no probabilities it follows from the depth alone: it must not tell
        the tokens of a drawn chain apart, or cutting would change what is drawn.
        """
        if not tree.log_probs:
            depth = tree.depths[node]
            return self._chains.rates(depth, self.population.chains.rates(depth))[-1]
        return self.population.confidences(tree.log_probs[node]) * self.scale

    def observe(self, seen: SeenRound) -> None:
        """Learns from a verified round. Of a tree that the request has narrowed, others learn the
        chain of its best nodes alone: it says too little of what whole levels are worth."""
        population = self.population
        population.num_rounds += 1
        for chains in (self._chains, population.chains):
            chains.observe(seen.num_chain_accepted, seen.num_chain_levels)
        for trees in (self._trees,) if self.is_narrowed else (self._trees, population.trees):
            if seen.is_tree:
                trees.observe(seen.num_accepted, seen.num_levels)
            else:
                trees.counts.age()
        if seen.tried:
            self._rescale(seen)
            self.population.confidences.observe(seen.tried)

    def _rescale(self, seen: SeenRound) -> None:
        memory = 1.0 - self.smoothing
        confidences = self.population.confidences
        expected = sum(confidences(log_prob) for log_prob, _ in seen.tried)
        self._expected = memory * self._expected + expected
        self._hits = memory * self._hits + sum(is_hit for _, is_hit in seen.tried)
        scale = (self._hits + UNEXPLAINED) / (self._expected + UNEXPLAINED)
        self.scale = min(max(scale, SMALLEST_SCALE), LARGEST_SCALE)


@dataclass(frozen=True, slots=True)
class SeenRound:
    """What a verdict says about a tree.

    Attributes:
        num_levels: levels that were put to the test: those accepted and the one that was not, if
            its nodes were verified or the draft had none.
        num_chain_accepted, num_chain_levels: the same for the chain of best nodes alone.
        tried: log probability and verdict of each node whose parent was accepted.
    """

    is_tree: bool
    num_accepted: int
    num_levels: int
    num_chain_accepted: int
    num_chain_levels: int
    tried: list[tuple[float, bool]]


def seen_round(
    tree: TokenTree,
    kept: SequenceOf[int],
    accepted: SequenceOf[int],
    max_levels: int,
    *,
    is_tree: bool,
) -> SeenRound:
    """Reads a verdict.

    Args:
        tree: as it was drafted.
        kept: its nodes that were verified.
        accepted: path of nodes, the root's child first.
        max_levels: depth that was asked for, or less where the output ends before.
    """
    path: list[int | None] = [None, *accepted]
    verified = set(kept)
    children: dict[int | None, list[int]] = {parent: [] for parent in path}
    for node, parent in enumerate(tree.parent_indices):
        if parent in children:
            children[parent].append(node)
    depth = len(accepted)
    last = children[path[-1]]
    was_tested = depth < max_levels and (not last or any(node in verified for node in last))
    num_levels = depth + was_tested
    num_best = 0
    while num_best < depth and accepted[num_best] == _best(tree, children[path[num_best]]):
        num_best += 1
    taken = set(accepted)
    tried = [
        (tree.log_probs[node], node in taken)
        for parent in path
        for node in children[parent]
        if tree.log_probs and node in verified
    ]
    return SeenRound(
        is_tree,
        depth,
        num_levels,
        num_best,
        num_best + 1 if num_best < depth else num_levels,
        tried,
    )


def _best(tree: TokenTree, nodes: SequenceOf[int]) -> int:
    return max(nodes, key=lambda node: (tree.log_probs[node] if tree.log_probs else 0.0, -node))
