"""Starts the processes that share a model with this one, one a device, and ends with them.

This process is rank 0 and runs the engine. The others load their part of the weights, hold their
part of the KV pool and follow; they see no request and no stream. On other hosts a process starts
those of its host, and ends with them.
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
from torch.distributed import Store  # type: ignore[attr-defined]
from tqdm import tqdm  # type: ignore[import-untyped]

from services.bound import call_unpickled, end_with_parent
from services.hosts import Terms, await_hosts, join_hosts, open_store
from services.ranks import Ranks
from shared.errors import SettingsError
from shared.layers.tensor_group import TensorGroup, open_group
from shared.models.config import ModelConfig
from shared.models.shard import Shard
from shared.runtime.device import device_named, launch_on
from shared.runtime.lockstep import Leader
from shared.telemetry.logs import LogFormat, configure_logs

logger = logging.getLogger(__name__)
_STOP_GRACE_S = 10.0
_KILL_GRACE_S = 5.0
_WORD_S = 1.0
"""Within so long two ends of one event are heard of, whichever comes first."""


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
        address: of the store in which all meet.
    """

    service: str
    rank: int
    ranks: Ranks
    device: torch.device
    address: str

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
        store = open_store(self.address, self.ranks.size, is_first=False)
        return joined_group(store, self.ranks, self.rank, self.device)


Work: TypeAlias = Callable[[Seat, Connection], None]
"""The work of a follower until rank 0 closes the pipe; sent to its process, so a function of a
module, or a `partial` of one."""


class Followers:
    """The processes of ranks 1 and above.

    Attributes:
        leader: announces to them what this process computes.
        group: that they share with this process.
    """

    def __init__(
        self,
        work: Work,
        ranks: Ranks,
        devices: Sequence[torch.device],
        *,
        service: str,
        terms: Terms = Terms(),  # noqa: B008 - frozen
    ) -> None:
        """Starts those of this host, and returns once all have joined; they load their weights
        meanwhile.

        Args:
            devices: of the ranks of this host, this process's first.
            service: see `Seat`.
            terms: on which other hosts must agree.

        Raises:
            SettingsError: other hosts do not come, or do not agree.
        """
        store = open_store(ranks.address, ranks.size, is_first=True)
        address = ranks.address or f"127.0.0.1:{store.port}"
        self._service = service
        self._hosts = await_hosts(ranks, store, terms)
        self._processes: list[SpawnProcess] = []
        pipes: dict[Connection, str] = {}
        for rank, device in zip(ranks.here[1:], devices[1:], strict=True):
            own_end, other_end = multiprocessing.Pipe()
            process = _started(work, Seat(service, rank, ranks, device, address), other_end)
            pipes[own_end] = process.name
            self._processes.append(process)
        for host in self._hosts:
            pipes |= {pipe: f"{service}-{rank} of {host.name}" for rank, pipe in host.pipes.items()}
        self._pipes = list(pipes)
        # Nobody says anything on them, so that one can be read when its other end is gone.
        self._names = pipes | {host.own: host.name for host in self._hosts}
        # Before the group is there: one that dies on its way into it would be waited for as well.
        self._stopped, self._stopping = multiprocessing.Pipe(duplex=False)
        self._watcher = threading.Thread(target=self._watch, name="followers", daemon=True)
        self._watcher.start()
        launch_on(devices[0])
        try:
            self.group = joined_group(store, ranks, 0, devices[0])
        except Exception:  # whatever it is, they would wait for this process
            self._stop_watching()
            end_processes(self._processes, 0.0)
            raise
        self.leader = Leader(self.group, self._pipes)

    def stop(self) -> None:
        """Ends them; nothing is computed any more. Where one has died, this process ends at once:
        whoever was in a collective with it may hear of that before the watch does."""
        self._stop_watching()
        ended = multiprocessing.connection.wait(self._names, 0.0)
        dead = [name for pipe, name in self._names.items() if pipe in ended]
        if dead:
            self._end(dead)
        for host in self._hosts:
            host.dismiss()
        for pipe in self._names:
            pipe.close()
        dead = end_processes(self._processes, _STOP_GRACE_S)
        if dead:
            self._end(dead)
        self.group.close()

    def _watch(self) -> None:
        """Ends this process when a follower dies: a collective would wait for it for ever, and the
        thread that waits cannot be woken."""
        ended = multiprocessing.connection.wait([*self._names, self._stopped])
        if self._stopped not in ended:
            self._end([name for pipe, name in self._names.items() if pipe in ended])

    def _stop_watching(self) -> None:
        """A pipe that is watched is not closed before: its other end would not hear of it."""
        self._stopping.close()
        self._watcher.join()

    def _end(self, dead: Sequence[str]) -> NoReturn:
        """Ends this process. An orderly close of the group would wait for dead processes, or
        abort."""
        _end_without(dead, self._service)


def follow_first_host(
    work: Work,
    ranks: Ranks,
    devices: Sequence[torch.device],
    *,
    service: str,
    terms: Terms,
    grace_s: float,
) -> None:
    """Runs the processes of a host that is not the first, until rank 0 ends. Where it is gone, or
    one of the processes, this process ends at once with exit code 1.

    Args:
        devices, service, terms: see `Followers`.
        grace_s: time that rank 0 gets to end after SIGINT or SIGTERM; one host is of no use without
            the others.

    Raises:
        SettingsError: the first host is not there, or does not agree.
    """
    assert ranks.address is not None, "hosts have a place to meet"
    store = open_store(ranks.address, ranks.size, is_first=False)
    links = join_hosts(ranks, store, terms)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _end_after(grace_s))
    processes = [
        _started(work, Seat(service, rank, ranks, device, ranks.address), links.pipes[rank])
        for rank, device in zip(ranks.here, devices, strict=True)
    ]
    logger.info("ranks %d to %d follow %s", ranks.here[0], ranks.here[-1], links.name)
    ended = multiprocessing.connection.wait([links.own, *(each.sentinel for each in processes)])
    if links.was_dismissed(_WORD_S):
        end_processes(processes, _STOP_GRACE_S)
        return
    failed = [each.name for each in processes if each.exitcode]
    end_processes(processes, 0.0)
    # Those that die of another's death do so later.
    _end_without(failed if failed and links.own not in ended else [links.name], service)


def _started(work: Work, seat: Seat, pipe: Connection) -> SpawnProcess:
    """Starts a follower, which takes the pipe over."""
    call = pickle.dumps((_serve, (work, seat)))
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=call_unpickled, args=(call, pipe), name=seat.name)
    process.start()
    pipe.close()
    return process


def _end_without(dead: Sequence[str], service: str) -> NoReturn:
    names = ", ".join(dead)
    logger.critical("%s died; without its part of the model this %s ends", names, service)
    logging.shutdown()
    os._exit(1)


def _end_after(grace_s: float) -> None:
    timer = threading.Timer(grace_s, os._exit, (1,))
    timer.daemon = True
    timer.start()


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


def joined_group(store: Store, ranks: Ranks, rank: int, device: torch.device) -> TensorGroup:
    """Joins the processes of a model; see `open_group`."""
    return open_group(
        store,
        rank=rank,
        size=ranks.size,
        device=device,
        num_stages=ranks.pp_size,
        num_hosts=ranks.num_hosts,
    )


def rank_devices(device: str, ranks: Ranks) -> list[torch.device]:
    """Returns the device of each rank of this host: neighbouring GPUs from `--device` on, or the
    CPU.

    Raises:
        SettingsError: there are not as many GPUs.
    """
    first = device_named(device)
    if first.type == "cpu":
        return [first] * ranks.num_here
    start, count = first.index or 0, torch.cuda.device_count()
    if start + ranks.num_here > count:
        raise SettingsError((f"{ranks.flags} from cuda:{start} on; this host has {count} GPUs",))
    return [torch.device("cuda", start + rank) for rank in range(ranks.num_here)]


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
