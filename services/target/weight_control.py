"""Updates of the weights while the engine runs, and the pauses of generation for them.

Owned by the engine thread. Its methods run between two steps; before the weights change, every
launched step is read.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.target.requests.request import Finished
from services.target.scheduler import Scheduler, Subscriptions
from services.target.sequence import Sequence
from services.target.weight_stager import RankCall, RankStages
from shared.errors import FailedPrecondition
from shared.kv.leases import KvLeases
from shared.models.decoder import Decoder
from shared.models.heads.target_tensors import Table, table_rows
from shared.models.weight_update import WeightStage, checksums, named_tensors
from shared.runtime.host_copy import HostCopy
from shared.runtime.memory import Shortage, is_shortage

logger = logging.getLogger(__name__)
FIRST_VERSION = "default"
"""The version of the weights that a process starts with."""
_NONE_MISSING: frozenset[str] = frozenset()
"""Names of missing tensors while the model is complete."""


@dataclass(slots=True)
class WeightVersion:
    """The name of the current weights. Not frozen: an update changes it.

    Attributes:
        num_updates: updates since the start.
    """

    name: str = FIRST_VERSION
    num_updates: int = 0


class PauseMode(enum.Enum):
    """What happens to running sequences when generation pauses.

    `abort` ends them. `retract` sends them back to the queue, and their KV is recomputed.
    `in_place` keeps them and their KV, which the weights before the update have computed.
    """

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


@dataclass(frozen=True, slots=True)
class Updated:
    """The result of an update.

    Attributes:
        num_retracted: sequences whose KV is recomputed.
        num_freed_pages: freed pages of the prefix cache.
        pause_s: how long no step ran.
    """

    version: str
    num_retracted: int
    num_freed_pages: int
    pause_s: float


class MemoryTag(enum.Enum):
    """Parts of device memory that can be released."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"


class MovableMemory:
    """Tensors whose memory can be released and allocated again, at other addresses.

    Args:
        is_movable: nothing else holds the addresses.
    """

    def __init__(self, tensors: Mapping[MemoryTag, Iterable[Tensor]], *, is_movable: bool) -> None:
        self.is_movable = is_movable
        self._storages = {tag: _storages(of_tag) for tag, of_tag in tensors.items()}

    def release(self, tag: MemoryTag) -> int:
        """Frees the memory of a tag; returns its bytes."""
        storages = self._storages[tag]
        for storage, _ in storages:
            storage.resize_(0)
        if storages and storages[0][0].device.type == "cuda":
            torch.cuda.empty_cache()
        return sum(size for _, size in storages)

    def take(self, tag: MemoryTag) -> None:
        """Allocates the memory of a tag again, filled with zeros."""
        for storage, size in self._storages[tag]:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


def _storages(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Returns each storage once, with its bytes; packed tensors are left out, as they cannot
    move."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in tensors
        if tensor.layout == torch.strided
    }
    return [(storage, storage.nbytes()) for storage in storages.values()]


class WeightControl:
    """Applies weight updates, pauses generation and releases memory; see the module.

    Args:
        quiesce: reads and commits every launched step and round.
        drop: removes a sequence that has ended.
        detach_sequence: removes a sequence from drafts and lanes, with their state of it.
        memory: memory that can be released.

    Attributes:
        version: version of the current weights.
        mode: mode of the pause; None while generation is not paused.
        released: memory that is released now.
        followers: callbacks after an update, which copy the decoder's tensors again or notify
            drafts.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        leases: KvLeases,
        scheduler: Scheduler,
        subscriptions: Subscriptions,
        version: WeightVersion,
        quiesce: Callable[[], None],
        drop: Callable[[Sequence], None],
        detach_sequence: Callable[[Sequence], None],
        memory: MovableMemory,
    ) -> None:
        self._decoder = decoder
        self._leases = leases
        self._scheduler = scheduler
        self._subscriptions = subscriptions
        self.version = version
        self._quiesce = quiesce
        self._drop = drop
        self._detach_sequence = detach_sequence
        self.mode: PauseMode | None = None
        self.memory = memory
        self.released: set[MemoryTag] = set()
        self._ranks: RankStages | None = None
        # Names of tensors that must still be updated before steps may run; None: all of them.
        self._missing: frozenset[str] | None = _NONE_MISSING
        self._snapshot: dict[str, str] = {}
        self.followers: list[Callable[[], None]] = []

    def share(self, ranks: RankStages) -> None:
        """Has the other ranks take part in updates; call it before the engine starts."""
        self._ranks = ranks

    @property
    def is_paused(self) -> bool:
        """Whether no step may run."""
        return self.mode is not None or self._missing != _NONE_MISSING or bool(self.released)

    def pause(self, mode: PauseMode) -> int:
        """Pauses generation; returns how many sequences were ended or sent back to the queue. New
        requests wait. A second pause applies its own mode to the running sequences."""
        self._quiesce()
        self.mode = mode
        if mode is PauseMode.ABORT:
            return self._abort(self._subscriptions.sequences)
        return self._retract() if mode is PauseMode.RETRACT else 0

    def resume(self) -> None:
        """Continues generation.

        Raises:
            FailedPrecondition: the weights are incomplete, or memory is released.
        """
        if self.released:
            raise _memory_released(self.released)
        if self._missing != _NONE_MISSING:
            raise FailedPrecondition(
                "the weights were reset or released, or an update broke off in the middle; send a "
                "whole update",
                reason="WEIGHTS_TORN",
            )
        self.mode = None

    def flush_if_idle(self) -> int:
        """Frees every cached page; returns their number.

        Raises:
            FailedPrecondition: requests run or, unless generation is paused, wait.
        """
        self._check_idle("flush the cache")
        return self._leases.flush()

    def _check_idle(self, what: str) -> None:
        """Raises: FailedPrecondition: requests run or, unless generation is paused, wait."""
        self._quiesce()
        scheduler = self._scheduler
        if scheduler.num_running or (scheduler.num_waiting and self.mode is None):
            raise FailedPrecondition(
                f"cannot {what}: {scheduler.num_running} requests run and {scheduler.num_waiting} "
                f"wait; wait for their end, or pause generation with mode abort or retract",
                reason="TARGET_IN_USE",
            )

    def apply(self, stage: WeightStage, version: str | None) -> Updated:
        """Applies an update, all of it or nothing. Cached KV is not reused; running sequences are
        retracted and their KV recomputed, unless generation was paused in place.

        Args:
            version: name of the new weights; None takes the number of updates so far.

        Raises:
            CheckpointError: the update is incomplete.
            FailedPrecondition: there is no room for a layer on the device.
        """
        begin_s = time.perf_counter()
        self._check(stage)
        missing = stage.all_names if self._missing is None else self._missing
        if MemoryTag.WEIGHTS in self.released:
            raise _memory_released(self.released)
        self._quiesce()
        for sequence in self._scheduler.waiting:  # a head keeps its KV of a preempted one
            self._detach_sequence(sequence)
        num_retracted = 0 if self.mode is PauseMode.IN_PLACE else self._retract()
        for sequence in self._scheduler.running:
            self._detach_sequence(sequence)
        if self._ranks is not None:
            self._ranks.agree()
        # If the update breaks off, the engine must compute nothing with these weights.
        names, self._missing = stage.names, None
        stage.apply()
        self._missing = missing - names
        self.version.num_updates += 1
        self.version.name = version or str(self.version.num_updates)
        for follow in self.followers:
            follow()
        num_freed = self._leases.retire()
        pause_s = time.perf_counter() - begin_s
        logger.info("weights %s are in force after %.3f s", self.version.name, pause_s)
        return Updated(self.version.name, num_retracted, num_freed, pause_s)

    def _check(self, stage: WeightStage) -> None:
        try:
            stage.check_ready()
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            message = f"no room on {self._decoder.device} for one layer beside the model: "
            raise FailedPrecondition(
                f"{message}{Shortage.of(error)}; lower --mem-fraction-static",
                reason="WEIGHT_UPDATE_NO_ROOM",
            ) from error

    def table_rows(
        self, table: Table, start: int, end: int, dtype: torch.dtype, *, num_updates: int
    ) -> HostCopy:
        """Queues the copy of a table's rows to the host.

        Raises:
            FailedPrecondition: `num_updates` is not the number of updates, or one broke off.
        """
        if num_updates != self.version.num_updates or self._missing != _NONE_MISSING:
            raise FailedPrecondition(
                f"the weights of update {num_updates} were asked for; {self.version.num_updates} "
                f"is in force",
                reason="WEIGHTS_CHANGED",
            )
        return HostCopy(self._rows(table, start, end).to(dtype, copy=True))

    def table(self, table: Table, dtype: torch.dtype) -> Tensor:
        """Returns a table `[V, H]`, on the device."""
        return self._rows(table, 0, self._decoder.config.vocab_size).to(dtype)

    def _rows(self, table: Table, start: int, end: int) -> Tensor:
        if self._ranks is not None:
            self._ranks.tell(RankCall("add_rows", (table, start, end)))
        return table_rows(self._decoder, table, start, end)

    def gather(self, call: RankCall) -> None:
        """Has the other ranks of the model gather the same part of an update as this process."""
        if self._ranks is not None:
            self._ranks.tell(call)

    def release(self, tags: Collection[MemoryTag]) -> tuple[int, tuple[str, ...]]:
        """Frees memory, except where CUDA graphs hold its addresses: it would come back at others.

        Returns:
            The freed bytes, and the memory that was kept, with the reason.

        Raises:
            FailedPrecondition: requests run or, unless generation is paused, wait.
        """
        self._check_idle("release memory")
        kept: list[str] = []
        num_bytes = 0
        for tag in tags:
            if tag in self.released:
                continue
            if not self.memory.is_movable:
                kept.append(f"{tag.value}: CUDA graphs hold its addresses")
                continue
            num_bytes += self.memory.release(tag)
            self.released.add(tag)
            if tag is MemoryTag.WEIGHTS:
                self._missing = None
        if MemoryTag.KV_CACHE in tags:
            self._leases.retire()
        return num_bytes, tuple(kept)

    def reoccupy(self, tags: Collection[MemoryTag]) -> None:
        """Allocates released memory again. Weights must then be sent in full.

        Raises:
            FailedPrecondition: too little memory is free.
        """
        for tag in tags:
            if tag in self.released:
                try:
                    self.memory.take(tag)
                except RuntimeError as error:
                    raise FailedPrecondition(
                        f"no memory for {tag.value}: {error}", reason="MEMORY_MISSING"
                    ) from error
                self.released.remove(tag)

    def checksums(self) -> Mapping[str, str]:
        """Returns the SHA-256 of each tensor."""
        return checksums(self._decoder)

    def snapshot(self) -> int:
        """Remembers the checksums of the weights for `compare`; returns the number of tensors."""
        self._snapshot = checksums(self._decoder)
        return len(self._snapshot)

    def compare(self) -> tuple[str, ...]:
        """Returns the names of the tensors that have changed since the `snapshot`.

        Raises:
            FailedPrecondition: no snapshot was taken.
        """
        if not self._snapshot:
            raise FailedPrecondition("no snapshot was taken", reason="SNAPSHOT_MISSING")
        now = checksums(self._decoder)
        return tuple(name for name, digest in now.items() if digest != self._snapshot[name])

    @torch.inference_mode()
    def reset(self) -> int:
        """Fills every tensor with zeros, to test that an update replaces all of them; returns their
        number. Generation pauses until all have been replaced.

        Raises:
            FailedPrecondition: requests run or, unless generation is paused, wait.
        """
        self._check_idle("reset the weights")
        self._missing = None
        tensors = [tensor for _, tensor in named_tensors(self._decoder)]
        for tensor in tensors:
            tensor.zero_()
        return len(tensors)

    def _abort(self, sequences: list[Sequence]) -> int:
        for sequence in sequences:
            sequence.cancel()
            self._subscriptions.emit(sequence, Finished.of(sequence))
            self._drop(sequence)
        self._subscriptions.deliver()
        return len(sequences)

    def _retract(self) -> int:
        running = self._scheduler.running
        for sequence in running:
            self._detach_sequence(sequence)
        self._scheduler.retract_all()
        return len(running)


def _memory_released(tags: Iterable[MemoryTag]) -> FailedPrecondition:
    names = ", ".join(sorted(tag.value for tag in tags))
    return FailedPrecondition(
        f"memory of {names} is released; resume it first", reason="MEMORY_RELEASED"
    )
