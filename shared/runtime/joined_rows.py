"""Rows that came in pieces, wherever those lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joined_rows(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the rows `[any, W]` of all pieces, end to end, on `device`.

    Targets of the same host share memory of their GPUs for what fits, and send the rest as bytes:
    pieces of one sequence may lie on several devices. The host waits for no copy to a GPU.
    """
    if len({piece.device for piece in pieces}) > 1:
        pieces = [_moved(piece, device) for piece in pieces]
    return _moved(torch.cat(tuple(pieces)), device)


def write_rows(pieces: Sequence[Tensor], out: Tensor) -> None:
    """Writes the rows of all pieces, end to end, to `out` `[any, W]`; see `joined_rows`."""
    if all(piece.device == out.device and piece.dtype == out.dtype for piece in pieces):
        torch.cat(tuple(pieces), out=out)
    else:
        out.copy_(joined_rows(pieces, out.device))


def _moved(rows: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or rows.device.type != "cpu":
        return rows.to(device)
    return rows.pin_memory().to(device, non_blocking=True)
