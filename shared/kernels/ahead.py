"""What a small kernel asks the L2 cache for while it runs: a part of the matrix that comes next.

Products of few rows are bound by reading their matrix, and the memory idles while small kernels
between them run. What has been fetched by then, a product need not wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_AHEAD_BYTES = 12 * 2**20
"""About what an H200's memory gives in 3 us, and a quarter of its L2 cache; 0 asks for nothing."""
PIECE_BYTES = 1024
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of `PIECE_BYTES` of a matrix, evenly spread, as no order of reading is known.

    Attributes:
        count: of pieces, at least 1.
        stride_bytes: from one to the next.
    """

    count: int
    stride_bytes: int


def pieces_of(matrix: Tensor, max_bytes: int = MAX_AHEAD_BYTES) -> Pieces | None:
    """Returns the pieces of a matrix to ask for; None where there is nothing to ask for."""
    held = matrix.nbytes // PIECE_BYTES
    count = min(held, max_bytes // PIECE_BYTES)
    if not count or not matrix.is_contiguous() or matrix.data_ptr() % _ALIGNMENT:
        return None
    return Pieces(count, held // count * PIECE_BYTES)
