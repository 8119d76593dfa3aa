"""Starts the processes that share a model with this one, one a device, and ends with them.

This process is rank 0 and runs the engine. The others load their part of the weights, hold their
part of the KV pool and follow; they see no request and no stream.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import NoReturn, Protocol, TypeAlias

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from tqdm import tqdm  # type: ignore[import-untyped]

from services.bound import call_unpickled, end_with_parent
from shared.errors import SettingsError
from shared.layers.tensor_group import TensorGroup, open_group
from shared.models.config import ModelConfig
from shared.models.shard import Shard
from shared.runtime.device import device_named, launch_on
from shared.runtime.lockstep import Leader
from shared.telemetry.logs import LogFormat, configure_logs

logger = logging.getLogger(__name__)
_HOST = "127.0.0.1"
_STOP_GRACE_S = 10.0
_KILL_GRACE_S = 5.0


class FollowerSettings(Protocol):
    """The settings that a follower process takes from its service."""

    @property
    def log_level(self) -> str: ...

    @property
    def log_format(self) -> LogFormat: ...

    @property
    def num_threads(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Seat:
    """A follower's place in the group.

    Attributes:
        service: `target` or `draft`.
    """

    service: str
    rank: int
    size: int
    device: torch.device
    store_port: int

    @property
    def name(self) -> str:
        """Name of the process."""
        return f"{self.service}-{self.rank}"

    def join(self, settings: FollowerSettings) -> TensorGroup:
        """Makes this process a follower: what it logs, when it ends, where it computes."""
        end_with_parent()
        # Ctrl-C reaches the whole group; rank 0 drains and then closes the pipe.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        configure_logs(self.name, level=settings.log_level, log_format=settings.log_format)
        # The lock of its own is a semaphore of the system, which this process ends without closing.
        tqdm.set_lock(threading.RLock())
        torch.set_num_threads(settings.num_threads)
        launch_on(self.device)
        store = TCPStore(_HOST, self.store_port, self.size, is_master=False)
        return open_group(store, rank=self.rank, size=self.size, device=self.device)


Work: TypeAlias = Callable[[Seat, Connection], None]
"""The work of a follower until rank 0 closes the pipe; sent to its process, so a function of a
module, or a `partial` of one."""


class Followers:
    """The processes of ranks 1 and above.

    Attributes:
        leader: announces to them what this process computes.
        group: that they share with this process.
    """

    def __init__(self, work: Work, devices: Sequence[torch.device], *, service: str) -> None:
        """Starts them and returns once all have joined; they load their weights meanwhile.

        Args:
            devices: of all ranks, this process's first.
            service: see `Seat`.
        """
        size = len(devices)
        store = TCPStore(_HOST, 0, size, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._service = service
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for rank in range(1, size):
            own_end, other_end = context.Pipe()
            seat = Seat(service, rank, size, devices[rank], store.port)
            call = pickle.dumps((_serve, (work, seat)))
            process = context.Process(target=call_unpickled, args=(call, other_end), name=seat.name)
            process.start()
            other_end.close()
            self._pipes.append(own_end)
            self._processes.append(process)
        # Before the group is there: one that dies on its way into it would be waited for as well.
        self._is_stopping = threading.Event()
        threading.Thread(target=self._watch, name="followers", daemon=True).start()
        launch_on(devices[0])
        try:
            self.group = open_group(store, rank=0, size=size, device=devices[0])
        except Exception:  # whatever it is, they would wait for this process
            self._is_stopping.set()
            end_processes(self._processes, 0.0)
            raise
        self.leader = Leader(self.group, self._pipes)

    def stop(self) -> None:
        """Ends them; nothing is computed any more. Where one has died, this process ends at once:
        whoever was in a collective with it may hear of that before the watch does."""
        self._is_stopping.set()
        for pipe in self._pipes:
            pipe.close()
        dead = end_processes(self._processes, _STOP_GRACE_S)
        if dead:
            self._end(dead)
        self.group.close()

    def _watch(self) -> None:
        """Ends this process when a follower dies: a collective would wait for it for ever, and the
        thread that waits cannot be woken."""
        names = {process.sentinel: process.name for process in self._processes}
        ended = multiprocessing.connection.wait(list(names))
        if self._is_stopping.is_set():
            return
        self._end([name for sentinel, name in names.items() if sentinel in ended])

    def _end(self, dead: Sequence[str]) -> NoReturn:
        """Ends this process. An orderly close of the group would wait for dead processes, or
        abort."""
        logger.critical(
            "%s died; without its part of the model this %s ends",
            *(", ".join(dead), self._service),
        )
        logging.shutdown()
        os._exit(1)


def end_processes(processes: Sequence[SpawnProcess], grace_s: float) -> list[str]:
    """Waits for processes to end, and kills those that take longer than `grace_s`.

    Returns:
        The names of those that have ended badly by themselves.
    """
    deadline_s = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
    failed = [process.name for process in processes if process.exitcode]
    for process in processes:
        if process.is_alive():
            logger.warning("%s does not end; it is killed", process.name)
            process.kill()
            # A driver may hold even a killed process; it cannot compute any more.
            process.join(_KILL_GRACE_S)
    return failed


def rank_devices(device: str, size: int) -> list[torch.device]:
    """Returns the device of each rank: neighbouring GPUs from `--device` on, or the CPU.

    Raises:
        SettingsError: there are not as many GPUs.
    """
    first = device_named(device)
    if first.type == "cpu":
        return [first] * size
    start, count = first.index or 0, torch.cuda.device_count()
    if start + size > count:
        raise SettingsError(
            (f"--tp-size is {size} from cuda:{start} on; this host has {count} GPUs",)
        )
    return [torch.device("cuda", start + rank) for rank in range(size)]


def check_shard(shard: Shard, config: ModelConfig) -> None:
    """Raises: SettingsError if the model cannot be cut into such parts."""
    problems = shard.problems(config)
    if problems:
        raise SettingsError(problems)


def _serve(work: Work, seat: Seat, pipe: Connection) -> None:
    """Runs one follower, until rank 0 closes the pipe, and ends its process.

    At once: what a group and graphs hold, the end of the process gives back. Closing them in order
    would wait for rank 0, which waits for this process.
    """
    exit_code = 1
    try:
        work(seat, pipe)
        exit_code = 0
    except Exception:
        logger.exception("cannot compute its part of the model")
    finally:
        logging.shutdown()
        os._exit(exit_code)
