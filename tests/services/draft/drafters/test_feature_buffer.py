"""Feature rows come in pieces, overlap, miss, and are freed."""

from __future__ import annotations

import random

import pytest
import torch

from services.draft.drafters.head_contexts import FeatureBuffer
from services.draft.events import FeatureRows


def _rows(start: int, end: int) -> FeatureRows:
    return FeatureRows(start, torch.arange(start, end, dtype=torch.float32).unsqueeze(1))


def _read(buffer: FeatureBuffer, start: int, count: int) -> list[float]:
    return [value for piece in buffer.read(start, count) for value in piece[:, 0].tolist()]


def test_pieces_read_as_one() -> None:
    buffer = FeatureBuffer()
    for start, end in ((0, 3), (3, 4), (4, 9)):
        buffer.append(_rows(start, end))
    assert (buffer.start, buffer.end) == (0, 9)
    assert _read(buffer, 2, 4) == [2, 3, 4, 5]
    assert _read(buffer, 0, 9) == list(range(9))
    assert _read(buffer, 9, 0) == []


def test_rows_that_came_before_are_left_out() -> None:
    buffer = FeatureBuffer()
    buffer.append(_rows(0, 4))
    buffer.append(_rows(2, 6))
    buffer.append(_rows(1, 3))
    assert (buffer.start, buffer.end) == (0, 6)
    assert _read(buffer, 0, 6) == list(range(6))


def test_a_gap_drops_what_is_before_it() -> None:
    buffer = FeatureBuffer()
    buffer.append(_rows(0, 4))
    buffer.append(_rows(5, 7))
    assert (buffer.start, buffer.end) == (5, 7)


def test_a_freed_buffer_still_knows_where_it_ended() -> None:
    buffer = FeatureBuffer()
    buffer.append(_rows(0, 4))
    buffer.drop_before(4)
    assert (buffer.start, buffer.end) == (4, 4)
    buffer.append(_rows(3, 5))
    assert _read(buffer, 4, 1) == [4]


def test_reading_what_is_not_here_is_a_bug() -> None:
    buffer = FeatureBuffer()
    buffer.append(_rows(3, 5))
    with pytest.raises(AssertionError, match="not here"):
        list(buffer.read(2, 2))
    with pytest.raises(AssertionError, match="not here"):
        list(buffer.read(4, 2))


def test_any_stream_of_overlapping_pieces_reads_back() -> None:
    generator = random.Random(3)
    buffer, end, dropped = FeatureBuffer(), 0, 0
    for _ in range(200):
        start = generator.randrange(max(end - 4, 0), end + 1)
        buffer.append(_rows(start, start + generator.randrange(6)))
        end = max(end, buffer.end)
        dropped = generator.randrange(dropped, end + 1)
        buffer.drop_before(dropped)
        assert buffer.start <= max(dropped, buffer.start)
        assert _read(buffer, dropped, end - dropped) == list(range(dropped, end))
