"""The followers' side of `lockstep`: passes that grow trees, and rounds."""

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
    """Repeats the calls of rank 0's grower and of its split. Reads nothing back to the host.

    Args:
        grower: grower of this rank's part of the model.
    """

    def __init__(self, grower: TreeGrower) -> None:
        self._growers = {False: grower, True: grower.split()}
        self._parts: dict[bool, Parts] = {}

    @torch.inference_mode()
    def take(self, message: object) -> None:
        """Repeats a call that rank 0 announces."""
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
    """Repeats the target's part of rank 0's rounds, by the same code. Reads nothing back.

    Args:
        runner: runner of this rank's part of the model.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        group = runner.decoder.group
        assert group is not None, "a follower needs a group"
        self._group = group
        self._rounds: dict[RoundsKey, RoundGraphs] = {}
        self._memory: Any | None = None
        if runner.device.type == "cuda":
            # As on rank 0: rounds of two shapes are never under way at once.
            self._memory = torch.cuda.graph_pool_handle()

    def take(self, message: object) -> None:
        """Repeats the work that rank 0 announces."""
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
