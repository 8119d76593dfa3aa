"""Which pieces of a matrix are asked for before it is read."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.ahead import PIECE_BYTES, Pieces, pieces_of


@pytest.mark.parametrize(
    ("num_bytes", "max_pieces", "expected"),
    [
        (8 * PIECE_BYTES, 8, Pieces(8, PIECE_BYTES)),
        (8 * PIECE_BYTES + 16, 100, Pieces(8, PIECE_BYTES)),
        (8 * PIECE_BYTES, 4, Pieces(4, 2 * PIECE_BYTES)),
        (8 * PIECE_BYTES, 3, Pieces(3, 2 * PIECE_BYTES)),
        (PIECE_BYTES - 1, 8, None),
        (8 * PIECE_BYTES, 0, None),
    ],
)
def test_pieces_are_spread_over_the_matrix(
    num_bytes: int, max_pieces: int, expected: Pieces | None
) -> None:
    matrix = torch.empty(num_bytes, dtype=torch.uint8)
    pieces = pieces_of(matrix, max_pieces * PIECE_BYTES)
    assert pieces == expected
    if pieces is not None:
        assert (pieces.count - 1) * pieces.stride_bytes + PIECE_BYTES <= num_bytes


def test_only_whole_memory_is_asked_for() -> None:
    matrix = torch.empty(64, 2 * PIECE_BYTES, dtype=torch.uint8)
    assert pieces_of(matrix) is not None
    assert pieces_of(matrix[:, :PIECE_BYTES]) is None
    assert pieces_of(matrix.flatten()[8:]) is None
