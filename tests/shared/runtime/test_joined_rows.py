"""Pieces of rows are joined in their order, also where they lie on several devices."""

from __future__ import annotations

import pytest
import torch

from shared.runtime.host_copy import joined_rows

CPU, OTHER = torch.device("cpu"), torch.device("meta")


def test_pieces_come_in_their_order() -> None:
    rows = torch.arange(12.0).view(6, 2)
    assert torch.equal(joined_rows([rows[:1], rows[1:4], rows[4:]], CPU), rows)
    assert torch.equal(joined_rows([rows], CPU), rows)


def test_pieces_of_several_devices_come_to_one() -> None:
    pieces = [torch.zeros(2, 3), torch.zeros(1, 3, device=OTHER), torch.zeros(3, 3)]
    joined = joined_rows(pieces, OTHER)
    assert joined.device == OTHER
    assert joined.shape == (6, 3)


@pytest.mark.gpu
def test_rows_of_the_host_and_of_a_gpu_are_joined_on_the_gpu() -> None:
    device, rows = torch.device("cuda", 0), torch.arange(12.0).view(6, 2)
    pieces = [rows[:2], rows[2:3].to(device), rows[3:]]
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat(pieces)
    joined = joined_rows(pieces, device)
    assert joined.device == device
    assert torch.equal(joined.cpu(), rows)
