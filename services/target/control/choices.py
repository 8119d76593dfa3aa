"""Which sequences to draft for, with which trees: what promises most goodput. No torch."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from services.target.control.goodput import Device, Part, WaitTime
from shared.tokens import TreeShape

NUM_PASSES = 2
"""Times each group's choice is revised against those of the others."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that one draft can draft for.

    Attributes:
        shapes: trees it may be asked for.
        tokens: `[sequence][shape]`, tokens a round is expected to commit, bonus included.
        rows: `[sequence][shape]`, rows that a round verifies at most, the root included.
        wait_s: of the draft.
    """

    shapes: tuple[TreeShape, ...]
    tokens: Sequence[Sequence[float]]
    rows: Sequence[Sequence[int]]
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


class Freedom(enum.Enum):
    """What may be chosen for the sequences of a draft."""

    ANY = enum.auto()
    """Any number of them, or none."""

    ALL = enum.auto()
    """All of them, with trees of any shape."""

    NONE = enum.auto()
    """All of them, with trees of the draft's own shape."""


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
    parts = [
        _part(group, choice.shape, len(choice.members), *_sums(group, choice))
        for group, choice in zip(groups, choices, strict=True)
        if choice.shape is not None
    ]
    num_wanted = sum(len(choice.members) for choice in choices)
    num_paused = sum(len(group.tokens) for group in groups) - num_wanted
    return _with_plain(parts, num_plain + num_paused)


def best_choices(
    groups: Sequence[Group], num_plain: int, device: Device, freedom: Freedom = Freedom.ANY
) -> list[Choice]:
    """Returns the best choice for each draft: exact for one, by turns for several.

    One draft grows trees of one shape for all its sequences, because trees of different shapes
    cost it a batch each; what a sequence does not need is cut before it is verified. Of a shape,
    the sequences that gain most from it are the best of any number, if they have as many rows.

    Args:
        freedom: not `NONE`, which leaves nothing to choose.
    """
    choices = [NOTHING] * len(groups)
    for _ in range(NUM_PASSES if len(groups) > 1 else 1):
        for index, group in enumerate(groups):
            others = [choice if place != index else NOTHING for place, choice in enumerate(choices)]
            parts = parts_of(groups, others, num_plain)
            fixed = [part for part in parts if part.is_drafted]
            num_free = sum(part.num_sequences for part in parts if not part.is_drafted)
            choices[index] = _best_choice(group, fixed, num_free, device, freedom)
    return choices


def _best_choice(
    group: Group, fixed: Sequence[Part], num_free: int, device: Device, freedom: Freedom
) -> Choice:
    """Returns the best choice for a group.

    Args:
        fixed: what is drafted for others.
        num_free: sequences that step plainly, unless they are drafted for by this choice.
    """
    best, best_rate = NOTHING, -1.0
    if freedom is Freedom.ANY:
        best_rate = device.goodput(_with_plain(fixed, num_free))
    for shape in range(len(group.shapes)):
        order = sorted(range(len(group.tokens)), key=lambda each: -group.tokens[each][shape])
        tokens = list(itertools.accumulate(group.tokens[each][shape] for each in order))
        rows = list(itertools.accumulate(group.rows[each][shape] for each in order))
        for size in [len(order)] if freedom is Freedom.ALL else group_sizes(len(order)):
            own = _part(group, shape, size, tokens[size - 1], rows[size - 1])
            rate = device.goodput(_with_plain([own, *fixed], num_free - size))
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


def _with_plain(parts: Sequence[Part], num_plain: int) -> list[Part]:
    """Returns drafted parts with the one of the sequences that step plainly, if there are any."""
    return [*parts, Part(num_plain, float(num_plain), num_plain)] if num_plain else [*parts]


def _sums(group: Group, choice: Choice) -> tuple[float, int]:
    """Returns the tokens and the rows of a round of the members."""
    assert choice.shape is not None
    tokens = sum(group.tokens[member][choice.shape] for member in choice.members)
    return tokens, sum(group.rows[member][choice.shape] for member in choice.members)


def _part(group: Group, shape: int, size: int, tokens: float, num_rows: int) -> Part:
    return Part(size, tokens, num_rows, group.wait_s(group.shapes[shape].num_steps, size))
