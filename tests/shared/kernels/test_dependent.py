"""Kernels are launched dependently where the device can and it pays."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.launch import dependent_launch

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


def test_traced_launch_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    traced = torch.compile(lambda rows: rows + dependent_launch(DEVICE, 1)["IS_DEPENDENT"],
                           backend="eager", fullgraph=True)  # fmt: skip
    assert traced(torch.zeros(1)).item() == 0.0
