"""Kernels are launched dependently where the device can and it pays."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.launch import bytes_ahead, dependent_launch, side_by_side

DEVICE = torch.device("cuda")
PLAIN = {"IS_DEPENDENT": False}
DEPENDENT = {"IS_DEPENDENT": True, "launch_pdl": True}


@pytest.mark.parametrize(
    ("capability", "num_rows", "expected"),
    [((9, 0), 1, DEPENDENT), ((10, 0), 32, DEPENDENT), ((9, 0), 33, PLAIN), ((8, 9), 1, PLAIN)],
)
def test_few_rows_on_hopper_or_later(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    num_rows: int,
    expected: dict[str, bool],
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert dependent_launch(DEVICE, num_rows) == expected


@pytest.mark.parametrize(
    ("row_bytes", "num_rows", "expected"),
    [
        (2048, 1024, 2048),  # all of a small weight
        (2048, 10_240, 768),  # the same piece of each row of a larger one
        (14_336, 303_872, 0),  # nothing of one whose pieces would be too short
        (2040, 1024, 0),  # nothing where rows are not aligned
    ],
)
def test_some_megabytes_are_fetched_ahead(row_bytes: int, num_rows: int, expected: int) -> None:
    assert bytes_ahead(row_bytes, num_rows) == expected


def test_outside_of_graphs_one_thing_comes_after_the_other() -> None:
    order: list[str] = []
    result = side_by_side(
        torch.device("cpu"), 1, lambda: order.append("first"), lambda: order.append("other")
    )
    assert result == (None, None)
    assert order == ["first", "other"]
