"""The GPUs of this host, as far as a launcher that does not load torch can see them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_DEVICE_FILE = re.compile(r"nvidia\d+")


def num_gpus(env: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Returns how many GPUs a child process would see.

    Args:
        env: `CUDA_VISIBLE_DEVICES` hides those that it does not name.
        devices: folder of device files, of which each GPU of a host or container has one.
    """
    present = sum(_DEVICE_FILE.fullmatch(each.name) is not None for each in devices.iterdir())
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [each.strip() for each in visible.split(",") if each.strip() not in ("", "-1")]
    return min(present, len(named))
