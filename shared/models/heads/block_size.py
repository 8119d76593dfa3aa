"""The number of rows that a DFlash head drafts over; free of torch, because settings ask for it."""

from __future__ import annotations

from shared.errors import CheckpointError
from shared.models.config_file import ConfigFile

BLOCK_SIZE_KEY = "block_size"
DEFAULT_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 33
"""The known token, and as many drafted ones as the deepest tree has levels."""


def read_block_size(config: ConfigFile) -> int:
    """Returns the rows of a block, the last committed token included.

    Raises:
        CheckpointError: it is out of range.
    """
    nested = config.nested("dflash_config").integer(BLOCK_SIZE_KEY, DEFAULT_BLOCK_SIZE)
    size = config.integer(BLOCK_SIZE_KEY, nested)
    if not 2 <= size <= MAX_BLOCK_SIZE:
        raise CheckpointError(
            f"{config.path}: {BLOCK_SIZE_KEY} is {size}; it must be in [2, {MAX_BLOCK_SIZE}]"
        )
    return size
