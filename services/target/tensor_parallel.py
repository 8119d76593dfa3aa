"""Starts the processes that share a target's model, one a device, and ends with them.

This process is rank 0 and runs the engine. The others load their part of the weights, hold their
part of the KV pool and follow; they see no request and no draft.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from services.bound import end_with_parent
from services.target.runner_factory import build_runner, check_tp_size
from services.target.settings import TargetSettings
from shared.errors import SettingsError
from shared.layers.tensor_group import open_group
from shared.models.config import ModelConfig
from shared.runtime.device import device_named, launch_on
from shared.runtime.lockstep import Leader, follow
from shared.telemetry.logs import configure_logs

logger = logging.getLogger(__name__)
_HOST = "127.0.0.1"
_STOP_GRACE_S = 10.0
_KILL_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Seat:
    """A follower's place in the group."""

    rank: int
    size: int
    store_port: int


class Followers:
    """The processes of ranks 1 and above.

    Attributes:
        leader: announces to them what this process computes.
        group: that they share with this process.
    """

    def __init__(self, settings: TargetSettings, feature_layers: tuple[int, ...] = ()) -> None:
        """Starts them and returns once all have joined; they load their weights meanwhile.

        Args:
            feature_layers: what `build_runner` is told in this process.

        Raises:
            CheckpointError: the model folder has no usable config.
            SettingsError: the model cannot be cut so, or there are not as many GPUs.
        """
        check_tp_size(settings, ModelConfig.from_folder(settings.model_path))
        size = settings.tp_size
        devices = rank_devices(settings)
        store = TCPStore(_HOST, 0, size, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for rank in range(1, size):
            own_end, other_end = context.Pipe()
            seat = Seat(rank, size, store.port)
            own = replace(settings, device=str(devices[rank]))
            process = context.Process(
                target=_serve, args=(own, seat, other_end, feature_layers), name=f"target-{rank}"
            )
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
        """Ends them; no step runs any more."""
        self._is_stopping.set()
        for pipe in self._pipes:
            pipe.close()
        end_processes(self._processes, _STOP_GRACE_S)
        self.group.close()

    def _watch(self) -> None:
        """Ends this process when a follower dies: a collective would wait for it for ever, and the
        thread that waits cannot be woken."""
        names = {process.sentinel: process.name for process in self._processes}
        ended = multiprocessing.connection.wait(list(names))
        if self._is_stopping.is_set():
            return
        dead = [name for sentinel, name in names.items() if sentinel in ended]
        logger.critical("%s died; without its part of the model this target ends", ", ".join(dead))
        logging.shutdown()
        os._exit(1)


def end_processes(processes: Sequence[SpawnProcess], grace_s: float) -> None:
    """Waits for processes that were told to end, and kills those that do not within `grace_s`."""
    deadline_s = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
    for process in processes:
        if process.is_alive():
            logger.warning("%s does not end; it is killed", process.name)
            process.kill()
            # A driver may hold even a killed process; it cannot compute any more.
            process.join(_KILL_GRACE_S)


def rank_devices(settings: TargetSettings) -> list[torch.device]:
    """Returns the device of each rank: neighbouring GPUs from `--device` on, or the CPU.

    Raises:
        SettingsError: there are not as many GPUs.
    """
    first, size = device_named(settings.device), settings.tp_size
    if first.type == "cpu":
        return [first] * size
    start, count = first.index or 0, torch.cuda.device_count()
    if start + size > count:
        raise SettingsError(
            (f"--tp-size is {size} from cuda:{start} on; this host has {count} GPUs",)
        )
    return [torch.device("cuda", start + rank) for rank in range(size)]


def _serve(
    settings: TargetSettings, seat: Seat, pipe: Connection, feature_layers: tuple[int, ...]
) -> None:
    """Runs one follower, until rank 0 closes the pipe, and ends its process.

    At once: what a group and graphs hold, the end of the process gives back. Closing them in order
    would wait for rank 0, which waits for this process.
    """
    exit_code = 1
    try:
        _follow(settings, seat, pipe, feature_layers)
        exit_code = 0
    except Exception:
        logger.exception("cannot compute its part of the model")
    finally:
        logging.shutdown()
        os._exit(exit_code)


def _follow(
    settings: TargetSettings, seat: Seat, pipe: Connection, feature_layers: tuple[int, ...]
) -> None:
    end_with_parent()
    # Ctrl-C reaches the whole group; rank 0 drains and then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name = f"target-{seat.rank}"
    configure_logs(name, level=settings.log_level, log_format=settings.log_format)
    torch.set_num_threads(settings.num_threads)
    device = torch.device(settings.device)
    launch_on(device)
    store = TCPStore(_HOST, seat.store_port, seat.size, is_master=False)
    group = open_group(store, rank=seat.rank, size=seat.size, device=device)
    follow(build_runner(settings, group, feature_layers=feature_layers).runner, group, pipe)
