"""Which speculation pays: the choice that maximises the expected tokens a second. No torch.

*Goodput* is the rate of committed tokens. A round of a sequence that is drafted for costs the wait
for its tree and a share of a wider step, and commits 1 token and the accepted nodes; a plain round
costs a share of a narrow step and commits 1. Everything here is arithmetic on estimates that are
handed in.

Source: goodput as the objective, Liu et al., arXiv 2406.14066; nodes ranked by the probability of
their path, Miao et al., arXiv 2305.09781.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.tokens import TokenTree, TreeShape

StepTime = Callable[[int], float]
"""Seconds of a step by its rows."""

WaitTime = Callable[[int, int], float]
"""Seconds from a verdict to the next trees, by their depth and the number of sequences."""

ROUNDING = 1e-9
NUM_PASSES = 2
"""Times each group's choice is revised against those of the others."""


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences that step together.

    Attributes:
        num_sequences: at least one.
        tokens: committed in a round by all of them.
        num_rows: of their part of the forward.
        wait_s: before each of their rounds.
    """

    num_sequences: int
    tokens: float
    num_rows: int
    wait_s: float = 0.0

    @property
    def is_drafted(self) -> bool:
        return self.num_rows > self.num_sequences


@dataclass(frozen=True, slots=True)
class Cycle:
    """What a batch commits from one step of all its sequences to the next."""

    tokens: float
    duration_s: float

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.duration_s if self.duration_s > 0 else 0.0


def cycle(parts: Sequence[Part], step_s: StepTime, slowdown: float = 1.0) -> Cycle:
    """Returns the cycle of sequences that decode side by side.

    While the slowest part waits, the quickest steps alone, over and over; a step that has begun is
    finished, however soon the trees come. Then all step together.

    Args:
        slowdown: how much longer a step takes while a draft computes, at least 1; above it where
            they share a device.
    """
    longest_s = max(part.wait_s for part in parts)
    quickest = min(parts, key=lambda part: part.wait_s)
    round_s = quickest.wait_s + slowdown * step_s(quickest.num_rows)
    slack = (longest_s - quickest.wait_s) / round_s if round_s > 0 else 0.0
    before_s = math.ceil(slack - ROUNDING) * round_s + quickest.wait_s
    tokens = 0.0
    for part in parts:
        own_s = part.wait_s + slowdown * step_s(part.num_rows)
        spare_s = before_s - part.wait_s
        num_more = math.floor(spare_s / own_s + ROUNDING) if own_s > 0 else 0
        tokens += part.tokens * (1 + num_more)
    return Cycle(tokens, before_s + step_s(sum(part.num_rows for part in parts)))


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that one draft can draft for.

    Attributes:
        shapes: trees it may be asked for.
        tokens: `[sequence][shape]`, tokens a round is expected to commit, bonus included.
        wait_s: of the draft.
    """

    shapes: tuple[TreeShape, ...]
    tokens: Sequence[Sequence[float]]
    wait_s: WaitTime


@dataclass(frozen=True, slots=True)
class Choice:
    """What one draft is asked for: trees of a shape for some sequences, and nothing for the rest.

    Attributes:
        shape: index into the group's shapes; None when no sequence is drafted for.
        members: indices of the sequences.
    """

    shape: int | None
    members: tuple[int, ...] = ()


NOTHING = Choice(None)


@dataclass(frozen=True, slots=True)
class Device:
    """What decoding costs the target.

    Attributes:
        step_s: seconds of a step by its rows.
        slowdown: see `cycle`.
        stretch: how much longer cycles with drafted sequences take than is expected of them.
    """

    step_s: StepTime
    slowdown: float = 1.0
    stretch: float = 1.0

    def goodput(self, parts: Sequence[Part]) -> float:
        """Returns the expected tokens a second of sequences that decode side by side."""
        is_drafted = any(part.is_drafted for part in parts)
        goodput = cycle(parts, self.step_s, self.slowdown).goodput
        return goodput / self.stretch if is_drafted else goodput


def goodput_of(
    groups: Sequence[Group], choices: Sequence[Choice], num_plain: int, device: Device
) -> float:
    """Returns the expected tokens a second of choices.

    Args:
        num_plain: sequences that no draft can draft for.
    """
    return device.goodput(parts_of(groups, choices, num_plain))


def parts_of(groups: Sequence[Group], choices: Sequence[Choice], num_plain: int) -> list[Part]:
    """Returns the batch that choices make; `num_plain` as in `goodput_of`."""
    parts, num_plain = _parts_of(list(zip(groups, choices, strict=True)), num_plain)
    return [*parts, Part(num_plain, float(num_plain), num_plain)] if num_plain else parts


def best_choices(
    groups: Sequence[Group], num_plain: int, device: Device, *, may_pause: bool = True
) -> list[Choice]:
    """Returns the best choice for each draft: exact for one, by turns for several.

    One draft grows trees of one shape for all its sequences, because trees of different shapes
    cost it a batch each; what a sequence does not need is cut before it is verified. Of a shape,
    the sequences that gain most from it are the best of any number.

    Args:
        may_pause: False drafts for every sequence.
    """
    choices = [NOTHING] * len(groups)
    for _ in range(NUM_PASSES if len(groups) > 1 else 1):
        for index, group in enumerate(groups):
            others = [
                (other, choice)
                for other, choice in zip(groups, choices, strict=True)
                if other is not group
            ]
            choices[index] = _best_choice(group, others, num_plain, device, may_pause=may_pause)
    return choices


def _best_choice(
    group: Group,
    others: Sequence[tuple[Group, Choice]],
    num_plain: int,
    device: Device,
    *,
    may_pause: bool,
) -> Choice:
    fixed, num_free = _parts_of(others, num_plain)
    num_free += len(group.tokens)
    best, best_rate = NOTHING, _rate([], fixed, num_free, device) if may_pause else -1.0
    for shape in range(len(group.shapes)):
        order = sorted(range(len(group.tokens)), key=lambda each: -group.tokens[each][shape])
        tokens, last = 0.0, 0
        for size in group_sizes(len(order)) if may_pause else [len(order)]:
            tokens += sum(group.tokens[each][shape] for each in order[last:size])
            last = size
            own = _part(group, shape, size, tokens)
            rate = _rate([own], fixed, num_free - size, device)
            if rate > best_rate:
                best, best_rate = Choice(shape, tuple(order[:size])), rate
    return best


def group_sizes(num_sequences: int) -> list[int]:
    """Returns the numbers of sequences that are tried: each up to 8, then about every third power
    of the square root of 2, and all."""
    sizes = [
        size
        for size in (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128, 192)
        if size < num_sequences
    ]
    return [*sizes, num_sequences] if num_sequences else []


def _parts_of(chosen: Sequence[tuple[Group, Choice]], num_plain: int) -> tuple[list[Part], int]:
    """Returns the parts of choices that stand, and the sequences that step plainly."""
    parts: list[Part] = []
    for group, choice in chosen:
        num_plain += len(group.tokens) - len(choice.members)
        if choice.shape is not None:
            tokens = sum(group.tokens[member][choice.shape] for member in choice.members)
            parts.append(_part(group, choice.shape, len(choice.members), tokens))
    return parts, num_plain


def _part(group: Group, shape: int, size: int, tokens: float) -> Part:
    wanted = group.shapes[shape]
    num_rows = size * (1 + wanted.max_node_count)
    return Part(size, tokens, num_rows, group.wait_s(wanted.num_steps, size))


def _rate(own: list[Part], fixed: list[Part], num_plain: int, device: Device) -> float:
    plain = [Part(num_plain, float(num_plain), num_plain)] if num_plain else []
    return device.goodput([*own, *fixed, *plain])


def best_cut(
    survivals: Sequence[Sequence[float]], num_rows: int, wait_s: float, step_s: StepTime
) -> list[list[int]]:
    """Returns the nodes of each drafted tree that are worth their row, in tree order.

    The trees compete: a deep node of a sure sequence can beat the first of a doubtful one. For any
    number of nodes the most probable are the best, so trying every number finds the optimum.

    Args:
        survivals: `[tree][node]`, probability that the path down to the node is accepted; never
            above that of the parent.
        num_rows: of the step without any node; each sequence in it commits a token for sure.
        wait_s: before a round with trees.
    """
    ranked = heapq.merge(*(_ranked(tree, nodes) for tree, nodes in enumerate(survivals)))
    order = [(tree, node) for _, tree, node in ranked]
    gains = [survivals[tree][node] for tree, node in order]
    tokens, best_size = float(num_rows), 0
    best_rate = _per_second(tokens, wait_s + step_s(num_rows))
    for size, gain in enumerate(gains, start=1):
        tokens += gain
        rate = _per_second(tokens, wait_s + step_s(num_rows + size))
        if rate >= best_rate:
            best_rate, best_size = rate, size
    kept: list[list[int]] = [[] for _ in survivals]
    for tree, node in order[:best_size]:
        kept[tree].append(node)
    return [sorted(nodes) for nodes in kept]


def _ranked(tree: int, survivals: Sequence[float]) -> list[tuple[float, int, int]]:
    """Parents come before children of the same probability, because they stand before them."""
    return sorted((-survival, tree, node) for node, survival in enumerate(survivals))


def _per_second(tokens: float, duration_s: float) -> float:
    return tokens / duration_s if duration_s > 0 else tokens


def path_survivals(tree: TokenTree, acceptance: Callable[[TokenTree, int], float]) -> list[float]:
    """Returns the probability that each node's path is accepted.

    Args:
        acceptance: of a node where its parent is accepted.
    """
    survivals: list[float] = []
    for node, parent in enumerate(tree.parent_indices):
        above = 1.0 if parent is None else survivals[parent]
        survivals.append(above * min(acceptance(tree, node), 1.0))
    return survivals
