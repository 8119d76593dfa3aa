"""Weights that change while the engine runs, and generation that holds still for it.

Owned by the engine thread, where it runs between two steps: every launched one has been read.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from services.target.requests.request import Finished
from services.target.requests.subscriptions import Subscriptions
from services.target.scheduler import Scheduler
from services.target.sequence import Sequence
from services.target.weight_version import WeightVersion
from shared.errors import FailedPrecondition
from shared.kv.leases import KvLeases
from shared.models.decoder import Decoder
from shared.models.weight_update import WeightStage, checksums, named_tensors
from shared.runtime.shortage import Shortage, is_shortage

logger = logging.getLogger(__name__)


class PauseMode(enum.Enum):
    """What becomes of sequences that run when generation pauses.

    `abort` ends them; `retract` sends them back to the queue, and their keys and values are
    computed anew; `in_place` leaves them as they are, with keys and values of the weights before.
    """

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


@dataclass(frozen=True, slots=True)
class WeightStatus:
    """What the weights are, and whether generation goes on.

    Attributes:
        pause: None while it does.
        is_torn: an update broke off in the middle, so that only a whole one can follow.
    """

    version: str
    num_updates: int
    pause: PauseMode | None
    is_torn: bool


@dataclass(frozen=True, slots=True)
class Updated:
    """What an update did.

    Attributes:
        num_retracted: sequences whose keys and values are computed anew.
        num_freed_pages: of the prefix cache.
    """

    version: str
    num_retracted: int
    num_freed_pages: int


class WeightControl:
    """See the module.

    Args:
        quiesce: reads and commits every launched step and round.
        drop: lets go of a sequence that has ended.
        unplace: takes a running sequence from drafts and lanes, which forget what they know of it.

    Attributes:
        followers: who borrows tensors of the decoder, and copies them after an update.
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
        unplace: Callable[[Sequence], None],
    ) -> None:
        self._decoder = decoder
        self._leases = leases
        self._scheduler = scheduler
        self._subscriptions = subscriptions
        self._version = version
        self._quiesce = quiesce
        self._drop = drop
        self._unplace = unplace
        self._pause: PauseMode | None = None
        self._is_torn = False
        self._snapshot: dict[str, str] = {}
        self.followers: list[Callable[[], None]] = []

    @property
    def is_paused(self) -> bool:
        """Whether no step may be taken."""
        return self._pause is not None or self._is_torn

    @property
    def status(self) -> WeightStatus:
        """What is in force."""
        version = self._version
        return WeightStatus(version.name, version.num_updates, self._pause, self._is_torn)

    def pause(self, mode: PauseMode) -> int:
        """Holds generation; returns how many sequences were ended or sent back. Requests that come
        meanwhile wait. Pausing again does what the new mode says."""
        self._quiesce()
        self._pause = mode
        if mode is PauseMode.ABORT:
            return self._abort(self._subscriptions.sequences)
        return self._retract() if mode is PauseMode.RETRACT else 0

    def resume(self) -> None:
        """Lets generation go on.

        Raises:
            FailedPrecondition: there are no whole weights to go on with.
        """
        if self._is_torn:
            raise torn_weights()
        self._pause = None

    def abort_all(self) -> int:
        """Ends every request; returns how many there were."""
        self._quiesce()
        return self._abort(self._subscriptions.sequences)

    def flush_if_idle(self) -> int:
        """Frees every cached page; returns how many.

        Raises:
            FailedPrecondition: requests run or wait, which the cache is for.
        """
        scheduler = self._scheduler
        if scheduler.num_running or scheduler.num_waiting:
            raise FailedPrecondition(
                f"{scheduler.num_running} requests run and {scheduler.num_waiting} wait; the cache "
                f"is flushed when none does",
                reason="CACHE_IN_USE",
            )
        return self._leases.flush()

    def apply(self, stage: WeightStage, version: str | None) -> Updated:
        """Puts an update in force, all of it or nothing. What was computed before is not reused;
        sequences that run are computed anew, unless generation was paused in place.

        Args:
            version: its name; the number of updates so far when None.

        Raises:
            CheckpointError: the update is incomplete.
            FailedPrecondition: there is no room for a layer on the device.
        """
        stage.check_complete()
        if self._is_torn and not stage.is_whole:
            raise torn_weights()
        self._quiesce()
        num_retracted = 0 if self._pause is PauseMode.IN_PLACE else self._retract()
        for sequence in self._scheduler.running:
            self._unplace(sequence)
        self._put(stage)
        self._is_torn = False
        self._version.num_updates += 1
        self._version.name = version or str(self._version.num_updates)
        for follow in self.followers:
            follow()
        num_freed = self._leases.retire()
        logger.info("weights %s are in force", self._version.name)
        return Updated(self._version.name, num_retracted, num_freed)

    def _put(self, stage: WeightStage) -> None:
        was_torn, self._is_torn = self._is_torn, True
        try:
            stage.apply()
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            self._is_torn = was_torn or not stage.is_untouched
            message = f"no room on {self._decoder.device} for one layer beside the model: "
            raise FailedPrecondition(
                f"{message}{Shortage.of(error)}; lower --mem-fraction-static",
                reason="WEIGHT_UPDATE_NO_ROOM",
            ) from error

    def checksums(self) -> Mapping[str, str]:
        """Returns the SHA-256 of each tensor."""
        return checksums(self._decoder)

    def snapshot(self) -> int:
        """Remembers what the weights are, for `compare`; returns how many tensors there are."""
        self._snapshot = checksums(self._decoder)
        return len(self._snapshot)

    def compare(self) -> tuple[str, ...]:
        """Returns the tensors that are not as they were at the `snapshot`.

        Raises:
            FailedPrecondition: there is none.
        """
        if not self._snapshot:
            raise FailedPrecondition("no snapshot was taken", reason="SNAPSHOT_MISSING")
        now = checksums(self._decoder)
        return tuple(name for name, digest in now.items() if digest != self._snapshot[name])

    @torch.inference_mode()
    def reset(self) -> int:
        """Fills every tensor with zeros, to see that an update replaces all of them; returns how
        many there are. Only a whole update can follow.

        Raises:
            FailedPrecondition: generation goes on.
        """
        if self._pause is None:
            raise FailedPrecondition(
                "generation goes on; pause it before the weights are reset",
                reason="GENERATION_NOT_PAUSED",
            )
        self._quiesce()
        self._is_torn = True
        tensors = [tensor for _, tensor in named_tensors(self._decoder)]
        for tensor in tensors:
            tensor.zero_()
        return len(tensors)

    def _abort(self, sequences: Iterable[Sequence]) -> int:
        num_aborted = 0
        for sequence in tuple(sequences):
            sequence.cancel()
            assert sequence.finish_reason is not None
            finished = Finished(
                sequence.finish_reason,
                sequence.num_prompt_tokens,
                sequence.num_output_tokens,
                sequence.num_cached_tokens,
                None,
                sequence.stats,
            )
            self._subscriptions.emit(sequence, finished)
            self._drop(sequence)
            num_aborted += 1
        self._subscriptions.deliver()
        return num_aborted

    def _retract(self) -> int:
        running = self._scheduler.running
        for sequence in running:
            self._unplace(sequence)
        self._scheduler.retract_all()
        return len(running)


def torn_weights() -> FailedPrecondition:
    """Returns that what is loaded is no model."""
    return FailedPrecondition(
        "the weights were reset, or an update broke off in the middle; send a whole update",
        reason="WEIGHTS_TORN",
    )
