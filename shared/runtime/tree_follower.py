"""A follower's side of passes that grow whole trees, see `tree_lockstep`."""

from __future__ import annotations

from contextlib import suppress

import torch

from shared.runtime.tree_draft import Parts
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_lockstep import BeginTrees, CaptureTrees, QueuePart


class TreeFollower:
    """Computes along with a grower and its split. Nothing is read back.

    Args:
        grower: of this process's part of the model.
    """

    def __init__(self, grower: TreeGrower) -> None:
        self._growers = {False: grower, True: grower.split()}
        self._parts: dict[bool, Parts] = {}

    @torch.inference_mode()
    def take(self, message: object) -> None:
        """Does what rank 0 announces that it does."""
        if isinstance(message, BeginTrees):
            self._parts[message.is_split] = self._growers[message.is_split].begin_parts(
                message.sequences,
                (),
                message.tree,
                num_choices=message.num_choices,
                is_walk=message.is_walk,
            )
        elif isinstance(message, QueuePart):
            with suppress(StopIteration):
                next(self._parts[message.is_split])
        else:
            assert isinstance(message, CaptureTrees), message
            grower = self._growers[message.is_split]
            grower.capture_next(
                message.tree,
                num_choices=message.num_choices,
                is_walk=message.is_walk,
                num_sequences=message.num_sequences,
            )
