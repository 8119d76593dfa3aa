"""The block size of a DFlash head. No torch, because the settings read it too."""

from __future__ import annotations

from shared.errors import CheckpointError
from shared.models.config_file import ConfigFile

BLOCK_SIZE_KEY = "block_size"
DEFAULT_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 33
"""The last committed token, and one drafted token for each level of the deepest tree."""


def read_block_size(config: ConfigFile) -> int:
    """Returns the number of rows of a block, the last committed token included.

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
