"""Products on one GPU: the library's in bfloat16, and ours, of few rows that keep their bits.

    python -m tests.bench.products [--weights e4m3] [--rows 256 1024 2048] [--tilings]

Matrices of Llama-3.1-8B in bfloat16, and of its half on each of two GPUs. Each case is one CUDA
graph over as many matrices as the cache does not hold. *Parts* leaves the sums over the depth to
the next kernel, and the product of gates and values computes SwiGLU as well, which the library's
does not. With weights in 8 bits ours are whole products. `--tilings` times whole products with each
tiling of many rows (rows, channels, programs on a multiprocessor), beside the one that is chosen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.linear import (
    MOST_FEW_ROWS,
    WORD_BLOCK,
    LinearWeight,
    gated_linear,
    linear,
    linear_partials,
)
from shared.kernels.quantised import QuantisedWeight, StoredMatrix
from tests.bench.aims import figure
from tests.bench.device_clock import copy_bandwidth, device_ms
from tests.bench.figure import Figure, add_figures_flag
from tests.load.figures import table

VOCABULARY = "vocabulary"
SIZES = {
    "queries, keys, values": (6144, 4096),
    "attention's output": (4096, 4096),
    "gates and values": (28672, 4096),
    "down": (4096, 14336),
    VOCABULARY: (128_256, 4096),
    "half of queries, keys, values": (3072, 4096),
    "half of attention's output": (4096, 2048),
    "half of gates and values": (14336, 4096),
    "half of down": (4096, 7168),
}
COUNTS = (1, 6, 32, 64)
NUM_LAYERS = 32
_MOST_BYTES = 2 * 10**9
BFLOAT16 = "bfloat16"
STORED = {
    "e4m3": (torch.float8_e4m3fn, None),
    "e4m3-blocks": (torch.float8_e4m3fn, WORD_BLOCK),
    "int8": (torch.int8, None),
}
"""The type of weights in 8 bits, and how many channels share a scale of 128 columns."""
Product = Callable[[Tensor], object]


@dataclass(frozen=True, slots=True)
class ProductRow:
    """One matrix, with microseconds for each number of rows.

    Attributes:
        bytes_us: of its bytes alone.
    """

    name: str
    library_us: tuple[float, ...]
    own_us: tuple[float, ...]
    bytes_us: float

    @property
    def count_in_step(self) -> int:
        """How often a step of one GPU multiplies with such a matrix."""
        if self.name.startswith("half"):
            return 0
        return 1 if self.name == VOCABULARY else NUM_LAYERS

    def cells(self) -> tuple[str, ...]:
        """Returns the row as text."""
        pairs = zip(self.library_us, self.own_us, strict=True)
        each = (f"{library:.1f} / {own:.1f}" for library, own in pairs)
        return self.name, *each, f"{self.bytes_us:.1f}"


def cost_figure(rows: Sequence[ProductRow]) -> Figure:
    """Returns the time of a step's products over that of the library's, where it is greatest."""
    bytes_us = sum(row.count_in_step * row.bytes_us for row in rows)
    costs = []
    for place, num_rows in enumerate(COUNTS):
        library_us = sum(row.count_in_step * row.library_us[place] for row in rows)
        own_us = sum(row.count_in_step * row.own_us[place] for row in rows)
        costs.append((own_us / library_us, bytes_us / library_us, f"{num_rows} rows"))
    return figure("cost of the same bits, products up to 64 rows", *max(costs))


def microseconds(rows: Tensor, each: Sequence[Product]) -> float:
    """Returns the time of one product of several in a CUDA graph."""

    def products() -> None:
        for product in each:
            product(rows)

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return 1e3 * device_ms(graph.replay) / len(each)


def own_product(name: str, weight: Tensor, kind: str) -> Product:
    """Returns our product of rows with a weight.

    Args:
        kind: `BFLOAT16`, or a key of `STORED`.
    """
    if kind in STORED:
        stored, block_rows = STORED[kind]
        quantised = QuantisedWeight.kept(
            StoredMatrix.rounded(weight, stored, block_rows=block_rows)
        )
        return lambda rows: linear(rows, quantised, None)
    prepared = LinearWeight.prepare(weight)
    if "gates" in name:
        return lambda rows: gated_linear(rows, prepared)
    return lambda rows: linear_partials(rows, prepared)


def measure(
    name: str, size: tuple[int, int], bandwidth: float, kind: str, counts: Sequence[int]
) -> ProductRow:
    """Measures one matrix with several numbers of rows."""
    channels, depth = size
    device = torch.device("cuda")
    size_bytes, weights = 2 * channels * depth, _weights(channels, depth)
    ours = [own_product(name, weight, kind) for weight in weights]
    library_us, own_us = [], []
    for num_rows in counts:
        inputs = torch.randn(num_rows, depth, device=device).to(torch.bfloat16)
        theirs = [partial(F.linear, weight=weight) for weight in weights]
        library_us.append(microseconds(inputs, theirs))
        own_us.append(microseconds(inputs, ours))
    return ProductRow(name, tuple(library_us), tuple(own_us), 1e3 * size_bytes / bandwidth)


def tiling_rows(name: str, size: tuple[int, int], counts: Sequence[int]) -> list[tuple[str, ...]]:
    """Returns, for each number of rows, the microseconds of the library and of every tiling."""
    from shared.kernels import many_rows_triton as many

    channels, depth = size
    weights = _weights(channels, depth)
    prepared = [LinearWeight.prepare(weight) for weight in weights]
    operand = prepared[0].operand_for(torch.bfloat16)
    assert operand is not None
    is_gated, is_whole = "gates" in name, operand.segments.count == 1
    ours: list[Product] = [
        partial(gated_linear, weight=each) if is_gated else partial(linear, weight=each, bias=None)
        for each in prepared
    ]
    found = list[tuple[str, ...]]()
    for num_rows in counts:
        inputs = torch.randn(num_rows, depth, device=weights[0].device).to(torch.bfloat16)
        library_us = microseconds(inputs, [partial(F.linear, weight=each) for each in weights])
        chosen_us, cells = microseconds(inputs, ours), list[str]()
        for tiling in many.TILINGS[many.Sum.WHOLE if is_whole else many.Sum.IN_TURN]:
            with mock.patch.object(many, "tiling_of", return_value=tiling):
                shape = f"{tiling.rows}x{tiling.channels}x{tiling.num_programs}"
                cells.append(f"{shape} {microseconds(inputs, ours):.1f}")
        times = f"{library_us:.1f}", f"{chosen_us:.1f}", "  ".join(cells)
        found.append((name, str(num_rows), *times))
    return found


def _weights(channels: int, depth: int) -> list[Tensor]:
    """Returns as many matrices as the cache does not hold."""
    count = max(3, min(24, _MOST_BYTES // (2 * channels * depth)))
    draw = partial(torch.randn, channels, depth, device="cuda")
    return [draw().mul_(0.02).to(torch.bfloat16) for _ in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench-products", description=__doc__)
    parser.add_argument("--weights", choices=(BFLOAT16, *STORED), default=BFLOAT16)
    parser.add_argument("--rows", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--tilings", action="store_true", help="time each tiling of many rows")
    add_figures_flag(parser)
    flags = parser.parse_args()
    if flags.tilings:
        if flags.weights != BFLOAT16 or min(flags.rows) <= MOST_FEW_ROWS:
            parser.error(
                f"--tilings needs --weights {BFLOAT16} and --rows above {MOST_FEW_ROWS}; they are "
                f"{flags.weights} and {' '.join(map(str, flags.rows))}"
            )
        found = [row for name, size in SIZES.items() for row in tiling_rows(name, size, flags.rows)]
        print(table(("product", "rows", "library", "chosen", "each, in microseconds"), found))
        return 0
    is_usual = flags.weights == BFLOAT16 and flags.rows == COUNTS
    bandwidth = copy_bandwidth()
    rows = []
    for name, size in SIZES.items():
        rows.append(measure(name, size, bandwidth, flags.weights, flags.rows))
        if is_usual and name == VOCABULARY:  # the last one that a step of one GPU has
            flags.figures.add([cost_figure(rows)])
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e9:.2f} TB/s; microseconds")
    heads = (f"{count} rows: library / ours" for count in flags.rows)
    print(table(("product", *heads, "bytes alone"), [row.cells() for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
