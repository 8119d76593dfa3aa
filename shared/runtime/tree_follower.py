"""A follower's side of passes that grow whole trees, see `tree_lockstep`."""

from __future__ import annotations

from contextlib import suppress

import torch

from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_lockstep import BeginTrees, CaptureTrees, QueuePart
from shared.runtime.tree_pass import Levels


class TreeFollower:
    """Computes along with a grower and its split. Nothing is read back.

    Args:
        grower: of this process's part of the model.
    """

    def __init__(self, grower: TreeGrower) -> None:
        self._growers = {False: grower, True: grower.split()}
        self._levels: dict[bool, Levels] = {}

    @torch.inference_mode()
    def take(self, message: object) -> None:
        """Does what rank 0 announces that it does."""
        if isinstance(message, BeginTrees):
            self._levels[message.is_split] = self._growers[message.is_split].begin_levels(
                message.sequences, (), message.tree, num_choices=message.num_choices
            )
        elif isinstance(message, QueuePart):
            with suppress(StopIteration):
                next(self._levels[message.is_split])
        else:
            assert isinstance(message, CaptureTrees), message
            grower = self._growers[message.is_split]
            grower.capture_next(message.tree, num_choices=message.num_choices)
