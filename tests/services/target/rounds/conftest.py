"""What tests of rounds share."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.device_rounds import Pair
from tests.helpers.shared_head_rounds import write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny target and its head, on the CPU."""
    device = torch.device("cpu")
    return write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head"), device)
