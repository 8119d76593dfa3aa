"""`python -m tests.bench.round_choice`: what is made of rounds on the device, by size and text.

Serves by the clock of a cost model, from nothing known, size after size by one controller. Times
are those of an 8B with an EAGLE-3 head on one GPU, see `docs/benchmarks.md`, and between and
beyond them on straight lines. Takes no notice of the machine.
"""

from __future__ import annotations

import sys

from shared.tokens import TreeShape
from tests.helpers.round_world import Simulation, World
from tests.load.figures import table

TREE = TreeShape(5, 8, 32)
LONG, MIDDLE, SHORT = TreeShape(5, 1, 6), TreeShape(3, 1, 4), TreeShape(1, 1, 2)
CAPACITIES = {TREE: 16, LONG: 64, MIDDLE: 64, SHORT: 64}
TEXTS = ((0.0, 0.0), (0.3, 0.4), (0.6, 0.75), (0.8, 0.88))
SIZES = (1, 8, 16, 32, 64)
DURATION_S = 3.0


def plain_s(num_sequences: int) -> float:
    """Returns the seconds of a plain step."""
    return 0.0045 + 0.000035 * num_sequences


def round_s(shape: TreeShape, num_sequences: int) -> float:
    """Returns the seconds of a round: rows of a tree cost twice those of a chain."""
    row_s = 0.0000085 if shape.topk == 1 else 0.0000165
    num_rows = num_sequences * (1 + shape.max_node_count)
    return plain_s(num_sequences) + 0.00005 + 0.0002 * shape.num_steps + row_s * num_rows


def world(chain: float, tree: float) -> World:
    """Returns a head that gets each level of chains and of trees right that often."""
    return World(
        plain_s, round_s, lambda shape, now_s: tree if shape.topk > 1 else chain, CAPACITIES
    )


def plain_rate(num_sequences: int) -> float:
    """Returns the tokens a second of plain decoding."""
    return num_sequences / plain_s(num_sequences)


def fixed_rate(world: World, shape: TreeShape, num_sequences: int) -> float:
    """Returns the tokens a second of rounds of one shape."""
    right = world.right(shape, 0.0)
    tokens = sum(right**level for level in range(shape.num_steps + 1))
    return num_sequences * tokens / world.round_s(shape, num_sequences)


def best_fixed(world: World, num_sequences: int) -> tuple[TreeShape | None, float]:
    """Returns the best of plain steps, None, and of the shapes, with its tokens a second."""
    rates: dict[TreeShape | None, float] = {
        shape: fixed_rate(world, shape, num_sequences)
        for shape, most in world.capacities.items()
        if most >= num_sequences
    }
    rates[None] = plain_rate(num_sequences)
    return max(rates.items(), key=lambda each: each[1])


def main() -> int:
    """Prints the table."""
    rows = []
    for chain, tree in TEXTS:
        simulation = Simulation(world(chain, tree))
        first = {size: _served(simulation, size) for size in SIZES}
        rows += [
            _row(simulation.world, f"{chain:.0%}, {tree:.0%}", size, first[size], again)
            for size, again in ((size, _served(simulation, size)) for size in SIZES)
        ]
    header = (
        "chains, trees right", "at a time", "plain tok/s", "own tree", "best fixed", "over plain",
        "chosen over plain", "again",
    )  # fmt: skip
    print(table(header, rows))
    return 0


def _served(simulation: Simulation, num_sequences: int) -> float:
    simulation.serve(num_sequences, DURATION_S)
    return simulation.rate


def _row(world: World, text: str, size: int, first: float, again: float) -> tuple[str, ...]:
    plain = plain_rate(size)
    shape, rate = best_fixed(world, size)
    own = fixed_rate(world, TREE, size) / plain if size <= world.capacities[TREE] else None
    return (
        text,
        str(size),
        f"{plain:.0f}",
        "" if own is None else f"{own:.2f}",
        "plain" if shape is None else f"{shape.num_steps},{shape.topk},{shape.num_draft_tokens}",
        f"{rate / plain:.2f}",
        f"{first / plain:.2f}",
        f"{again / plain:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
