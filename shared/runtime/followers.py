"""The followers' side of what rank 0 leads, see `lockstep`: passes that grow trees, and rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from shared.runtime.lockstep import (
    CaptureRound,
    GrowerCall,
    OpenRounds,
    QueueRound,
    ReceivedChunks,
    ReceivedTrees,
    RoundsKey,
)
from shared.runtime.round_batches import RoundBatches
from shared.runtime.round_graphs import RoundGraphs
from shared.runtime.round_state import RoundState
from shared.runtime.round_verification import RoundVerification
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_draft import Parts
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import fastest


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
        assert isinstance(message, GrowerCall), message
        if message.method is None:
            with suppress(StopIteration):
                next(self._parts[message.is_split])
            return
        grower = self._growers[message.is_split]
        result = message.method(grower, *message.args, **message.options)
        if isinstance(result, Iterator):
            self._parts[message.is_split] = result


class RoundFollower:
    """Computes the target's part of rounds along with rank 0, by the same code. Nothing is read.

    Args:
        runner: of this process's part of the model.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        group = runner.decoder.group
        assert group is not None, "a follower is one of a group"
        self._group = group
        self._rounds: dict[RoundsKey, RoundGraphs] = {}
        self._memory: Any | None = None
        if runner.device.type == "cuda":
            # As on rank 0: rounds of two shapes are never under way at once.
            self._memory = torch.cuda.graph_pool_handle()

    def take(self, message: object) -> None:
        """Does what rank 0 announces that it does."""
        match message:
            case OpenRounds():
                self._rounds[message.key] = self._opened(message)
            case CaptureRound():
                self._rounds[message.key].make(message.num_slots, message.sampling)
            case QueueRound():
                rounds = self._rounds[message.key]
                rounds.grow(message.num_slots, message.sampling)
                chunks = ReceivedChunks(self._group) if message.has_chunks else None
                rounds.forward(chunks)
                rounds.commit(message.sampling, chunks=chunks)
            case _:
                raise AssertionError(message)

    def _opened(self, message: OpenRounds) -> RoundGraphs:
        decoder, pool, shape = self._runner.decoder, self._runner.pool, message.sized.shape
        verification = fastest(RoundVerification, shape, pool.device)
        state = RoundState.empty(
            message.sized.max_sequences,
            max_open_rows=shape.max_committed,
            num_pages=message.num_pages,
            device=pool.device,
        )
        return RoundGraphs(
            ReceivedTrees(RoundBatches(shape, pool.page_size), self._group),
            verification(decoder, pool, shape, message.features, None, None),
            state,
            self._memory,
        )
