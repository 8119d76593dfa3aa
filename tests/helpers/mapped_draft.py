"""A draft whose head takes part in rounds from its own thread, through shared memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from services.target.drafts.attachment import (
    Attachment,
    DraftIdentity,
    DraftMessage,
    DraftTimeout,
    MappedOffer,
)
from services.target.drafts.feature_store import FeatureSpec
from services.target.engine import Engine
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.mapped_codec import command_from_message, command_message
from shared.runtime.mapped_head_worker import MappedHeadWorker
from shared.runtime.mapped_rounds import MappedCommand, MappedRound, OpenMapped, PrepareMapped
from shared.runtime.outcome_chains import MAX_OUTCOMES
from shared.runtime.tree_model import DecoderModel, HeadModel, TreeModel
from shared.tokens import TreeShape
from tests.helpers.device_rounds import Pair
from tests.helpers.engines import PAGE_SIZE

NUM_PAGES = 200


class MappedDraft:
    """Stands in for a draft's process: everything but gRPC is real.

    Attributes:
        commands: all commands received.
        num_opened: sequences that it was to push trees for.
        spans: name, start and end of its work in rounds.
        spoils: changes the trees `[S, 2, T]` before they are written.
        is_frozen: it does not react to announced rounds.
        is_full: it refuses messages.
        is_preparing: it takes messages and answers none.
    """

    def __init__(
        self,
        pair: Pair,
        engine: Engine,
        name: str,
        tree: TreeShape,
        model: Decoder | None = None,
        *,
        is_pinned: bool = True,
    ) -> None:
        """Args:
        model: drafts in place of the pair's head.
        """
        head = pair.head
        self.commands: list[MappedCommand] = []
        self.num_opened = 0
        self.spans: list[tuple[str, float, float]] = []
        self.spoils: Callable[[Tensor], Tensor] = lambda trees: trees
        self.is_full = self.is_preparing = False
        self._is_thawed = threading.Event()
        self._is_thawed.set()
        self._engine, self._name = engine, name
        pool = KvPool((model or head).kv_layout(PAGE_SIZE), NUM_PAGES, pair.decoder.device)
        self._model: TreeModel = HeadModel(head, pool)
        self._worker: MappedHeadWorker | None = None
        self._queue: queue.Queue[MappedCommand | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        spec, algorithm, num_outcomes = head.feature_spec, "EAGLE3", 0
        features = FeatureSpec("features", spec.layer_indices, spec.dtype, spec.projection)
        if model is not None:
            self._model = DecoderModel(model, pool)
            algorithm, num_outcomes = "STANDALONE", MAX_OUTCOMES
        self.attachment = Attachment(
            DraftIdentity(name, name, "model", algorithm, 64, 0.0, tree),
            self,
            DraftTimeout(0.0),
            features if model is None else None,
            mapped_offer=MappedOffer(self._model.vocab_size, 120, is_pinned, num_outcomes),
        )

    @property
    def is_frozen(self) -> bool:
        """Whether it delays all commands."""
        return not self._is_thawed.is_set()

    @is_frozen.setter
    def is_frozen(self, is_frozen: bool) -> None:
        if is_frozen:
            self._is_thawed.clear()
        else:
            self._is_thawed.set()

    def send(self, message: DraftMessage) -> bool:
        """Takes the commands after a round trip through their wire form."""
        if self.is_full:
            return False
        if self.is_preparing:
            return True
        self.num_opened += len(message.opened)
        for sent in message.commands:
            command = command_from_message(command_message(sent))
            assert command is not None
            self.commands.append(command)
            self._queue.put(command)
        return True

    def close(self) -> None:
        """The target has ended the stream."""

    def stop(self) -> None:
        """Ends the thread."""
        self.is_frozen = False
        self._queue.put(None)
        self._thread.join()

    def settle(self) -> None:
        """Waits until all commands received so far are done."""
        self._queue.join()

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (command := self._queue.get()) is not None:
            try:
                self._take(command)
            finally:
                self._queue.task_done()

    def _take(self, command: MappedCommand) -> None:
        match command:
            case OpenMapped():
                self._worker = MappedHeadWorker(
                    self._model, command, on_span=lambda *span: self.spans.append(span)
                )
                draw = self._worker._draw
                self._worker._draw = lambda *args: self.spoils(draw(*args))  # type: ignore[method-assign]
            case PrepareMapped(is_last=True):
                self._engine.map_head(self._name, tuple(range(1, NUM_PAGES)))
            case MappedRound():
                self._is_thawed.wait()
                assert self._worker is not None
                self._worker.take(command)
