"""Starts the follower processes that share a model with this one, one per device, and ends with
them.

This process is rank 0 and runs the engine. A follower loads its part of the weights, holds its part
of the KV pool and computes what rank 0 announces; it sees no requests. On each other host one
process starts the followers of that host, and ends with them.
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
from multiprocessing.process import BaseProcess
from typing import NoReturn, Protocol, TypeAlias

import torch
from torch.distributed import Store  # type: ignore[attr-defined]
from tqdm import tqdm  # type: ignore[import-untyped]

from services.bound import call_unpickled, end_with_parent
from services.hosts import Terms, await_hosts, join_hosts, open_store
from services.ranks import Ranks
from shared.errors import SettingsError, raise_problems
from shared.layers.tensor_group import TensorGroup, open_group
from shared.models.config import ModelConfig
from shared.models.shard import Shard
from shared.runtime.device import device_named, launch_on
from shared.runtime.lockstep import Leader
from shared.telemetry.logs import LogFormat, configure_logs

logger = logging.getLogger(__name__)
_STOP_GRACE_S = 10.0
_KILL_GRACE_S = 5.0
_DISMISSAL_WAIT_S = 1.0
"""Time in which a dismissal by rank 0 arrives after the first follower of the host has ended."""


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
        address: of the store through which all processes meet.
    """

    service: str
    rank: int
    ranks: Ranks
    device: torch.device
    address: str

    @property
    def name(self) -> str:
        return f"{self.service}-{self.rank}"

    def join(self, settings: FollowerSettings) -> TensorGroup:
        """Makes this process a follower: sets its logs, signals, device and group."""
        end_with_parent()
        # Ctrl-C reaches the whole group; rank 0 drains and then closes the pipe.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        configure_logs(self.name, level=settings.log_level, log_format=settings.log_format)
        # tqdm's default lock is a system semaphore, which this process would leave open at its end.
        tqdm.set_lock(threading.RLock())
        torch.set_num_threads(settings.num_threads)
        launch_on(self.device)
        store = open_store(self.address, self.ranks.size, is_first=False)
        return _join_group(store, self.ranks, self.rank, self.device)


Work: TypeAlias = Callable[[Seat, Connection], None]
"""The work of a follower until rank 0 closes the pipe. It is pickled, so it is a function of a
module, or a `partial` of one."""


class Followers:
    """The processes of ranks 1 and above.

    Attributes:
        leader: announces to the followers what this process computes.
        group: the group of all processes.
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
        """Starts the followers of this host, and returns once all processes have joined the group;
        followers load their weights meanwhile.

        Args:
            devices: of the ranks of this host, this process's first.
            service: see `Seat`.
            terms: on which other hosts must agree.

        Raises:
            SettingsError: another host does not connect, or has other terms.
        """
        store = open_store(ranks.address, ranks.size, is_first=True)
        address = ranks.address or f"127.0.0.1:{store.port}"
        self._service = service
        self._hosts = await_hosts(ranks, store, terms)
        self._processes: list[BaseProcess] = []
        pipes: dict[Connection, str] = {}
        for rank, device in zip(ranks.here[1:], devices[1:], strict=True):
            own_end, other_end = multiprocessing.Pipe()
            process = _start(work, Seat(service, rank, ranks, device, address), other_end)
            pipes[own_end] = process.name
            self._processes.append(process)
        for host in self._hosts:
            pipes |= {pipe: f"{service}-{rank} of {host.name}" for rank, pipe in host.pipes.items()}
        self._pipes = list(pipes)
        # Nothing is sent to this process on these, so one is readable only when its peer is gone.
        self._peer_names = pipes | {host.control: host.name for host in self._hosts}
        # Watched before the group is joined, because a follower may die while it joins.
        self._stop_receiver, self._stop_sender = multiprocessing.Pipe(duplex=False)
        self._watcher = threading.Thread(target=self._watch, name="followers", daemon=True)
        self._watcher.start()
        launch_on(devices[0])
        try:
            self.group = _join_group(store, ranks, 0, devices[0])
        except Exception:  # on any error: the followers would wait for this process
            self._stop_watching()
            end_processes(self._processes, 0.0)
            raise
        self.leader = Leader(self.group, self._pipes)

    def stop(self) -> None:
        """Ends the followers; nothing is computed any more. If one has died, this process exits at
        once: a collective with the dead one may fail before the watcher notices the death."""
        self._stop_watching()
        ended = multiprocessing.connection.wait(self._peer_names, 0.0)
        dead = [name for pipe, name in self._peer_names.items() if pipe in ended]
        if dead:
            _exit_without(dead, self._service)
        for host in self._hosts:
            host.dismiss()
        for pipe in self._peer_names:
            pipe.close()
        dead = end_processes(self._processes, _STOP_GRACE_S)
        if dead:
            _exit_without(dead, self._service)
        self.group.close()

    def _watch(self) -> None:
        """Exits this process when a follower dies: a collective would wait for the follower for
        ever, and the waiting thread cannot be woken."""
        ended = multiprocessing.connection.wait([*self._peer_names, self._stop_receiver])
        if self._stop_receiver not in ended:
            dead = [name for pipe, name in self._peer_names.items() if pipe in ended]
            _exit_without(dead, self._service)

    def _stop_watching(self) -> None:
        """Called before pipes are closed: the peer would not see a watched pipe close."""
        self._stop_sender.close()
        self._watcher.join()


def follow_first_host(
    work: Work,
    ranks: Ranks,
    devices: Sequence[torch.device],
    *,
    service: str,
    terms: Terms,
    grace_s: float,
) -> None:
    """Runs the followers of a host that is not the first, until rank 0 ends. If rank 0 or a
    follower dies, this process exits at once with exit code 1.

    Args:
        devices, service, terms: see `Followers`.
        grace_s: after SIGINT or SIGTERM, the time in which rank 0 should end; then this process
            exits, because one host is of no use without the others.

    Raises:
        SettingsError: the first host does not answer, or has other terms.
    """
    assert ranks.address is not None, "several hosts have an address to meet at"
    store = open_store(ranks.address, ranks.size, is_first=False)
    links = join_hosts(ranks, store, terms)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _exit_after(grace_s))
    processes = [
        _start(work, Seat(service, rank, ranks, device, ranks.address), links.pipes[rank])
        for rank, device in zip(ranks.here, devices, strict=True)
    ]
    logger.info("ranks %d to %d follow %s", ranks.here[0], ranks.here[-1], links.name)
    ended = multiprocessing.connection.wait(
        [links.control, *(process.sentinel for process in processes)]
    )
    if links.was_dismissed(_DISMISSAL_WAIT_S):
        end_processes(processes, _STOP_GRACE_S)
        return
    failed = [process.name for process in processes if process.exitcode]
    end_processes(processes, 0.0)
    # A process that dies because another one died ends later, so the first to end is named.
    _exit_without(failed if failed and links.control not in ended else [links.name], service)


def forked_process(
    target: Callable[..., None], *arguments: object, name: str | None = None
) -> BaseProcess:
    """Returns a process, not yet started, that need not load torch: Python's fork server has loaded
    it, once for all, and the process is a fork of that server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context.Process(target=target, args=arguments, name=name)


def _start(work: Work, seat: Seat, pipe: Connection) -> BaseProcess:
    """Starts a follower, which owns the pipe from now on."""
    call = pickle.dumps((_run_follower, (work, seat)))
    process = forked_process(call_unpickled, call, pipe, name=seat.name)
    process.start()
    pipe.close()
    return process


def _exit_without(dead: Sequence[str], service: str) -> NoReturn:
    """Exits this process. An orderly close of the group would wait for dead processes, or abort."""
    names = ", ".join(dead)
    logger.critical("%s died; without its part of the model this %s ends", names, service)
    logging.shutdown()
    os._exit(1)


def _exit_after(grace_s: float) -> None:
    timer = threading.Timer(grace_s, os._exit, (1,))
    timer.daemon = True
    timer.start()


def end_processes(processes: Sequence[BaseProcess], grace_s: float) -> list[str]:
    """Waits for processes to end, and kills those that take longer than `grace_s`.

    Returns:
        The names of processes that ended by themselves with an error.
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


def _join_group(store: Store, ranks: Ranks, rank: int, device: torch.device) -> TensorGroup:
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
    """Raises: SettingsError if the model cannot be split into such shards."""
    raise_problems(shard.problems(config))


def _run_follower(work: Work, seat: Seat, pipe: Connection) -> None:
    """Runs one follower until rank 0 closes the pipe, then exits its process at once.

    The group and CUDA graphs are freed by the exit. Closing them in order would wait for rank 0,
    which waits for this process.
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
