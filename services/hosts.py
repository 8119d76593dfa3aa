"""How the hosts of a model meet, and the connections from rank 0 to the followers of other hosts.

Rank 0's host runs the store of torch.distributed, in which it publishes its port. Each other host
connects to that port: once for itself, and once for each of its followers, for which the connection
is what a pipe is for followers on rank 0's host.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from services.ranks import Ranks
from shared.errors import SettingsError, raise_problems

LIMIT_S = 600.0
"""Longest time that hosts wait for each other at start-up."""
_LOOPBACK = "127.0.0.1"
_KEY = "outrider/hosts"
_HELLO_BYTES = 1 << 20
_END = b"end"
_CALLER_TIMEOUT = struct.pack("ll", 10, 0)
"""Receive timeout in seconds and microseconds, for the handshake of a host that connects."""
# A host that has lost network or power closes nothing: TCP keepalive detects it within 60 s.
_PROBES = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}


@dataclass(frozen=True, slots=True)
class Terms:
    """What the hosts of a model must agree on.

    Attributes:
        secret: each host proves that it knows it; None: rank 0 makes one and publishes it in the
            store.
        settings: values by name.
    """

    secret: str | None = field(default=None, repr=False)
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostLinks:
    """The connections between rank 0 and another host.

    Attributes:
        name: of the host at the other end, for messages.
        control: the connection of the host itself; its only message is rank 0's dismissal.
        pipes: of the host's followers, by rank.
    """

    name: str
    control: Connection
    pipes: Mapping[int, Connection]

    def dismiss(self) -> None:
        """Tells the host, if it is still connected, that rank 0 ends."""
        try:
            self.control.send_bytes(_END)
        except OSError:
            return

    def was_dismissed(self, wait_s: float) -> bool:
        """Whether a dismissal arrives within `wait_s`; without one, a closed connection means that
        rank 0 has died."""
        try:
            return self.control.poll(wait_s) and self.control.recv_bytes() == _END
        except (EOFError, OSError):
            return False


def open_store(address: str | None, size: int, *, is_first: bool) -> TCPStore:
    """Returns the store through which all processes of a model meet.

    Args:
        address: `HOST:PORT`; None for a free port on the loopback.
        size: number of processes.
        is_first: this process is rank 0, which runs the store.

    Raises:
        SettingsError: the address is not free, or no store answers there.
    """
    host, port = _host_and_port(address)
    try:
        return TCPStore(
            host,
            port,
            size,
            is_master=is_first,
            wait_for_workers=False,
            timeout=timedelta(seconds=LIMIT_S),
        )
    except RuntimeError as error:
        what = "cannot be listened on" if is_first else "does not answer as the first host would"
        problem = f"--dist-init-addr is {address}, which {what}: {error}"
        raise SettingsError((problem.splitlines()[0],)) from error


def await_hosts(ranks: Ranks, store: TCPStore, terms: Terms) -> list[HostLinks]:
    """Returns the links to all other hosts, once they have connected. Called on the first host.

    Raises:
        SettingsError: a host has not connected in time, or has other terms.
    """
    if ranks.num_hosts == 1:
        return []
    arrivals = _Arrivals(ranks, terms)
    host, _ = _host_and_port(ranks.address)
    secret = terms.secret or secrets.token_hex()
    deadline_s = time.monotonic() + LIMIT_S
    with _listener(host, ranks) as listener:
        published = None if terms.secret else secret
        store.set(_KEY, json.dumps({"port": listener.getsockname()[1], "secret": published}))
        while missing := arrivals.missing:
            listener.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                caller, address = listener.accept()
            except TimeoutError:
                names = ", ".join(map(str, missing))
                raise SettingsError(
                    (
                        f"--node-rank {names} of --nnodes {ranks.num_hosts} did not come to "
                        f"{ranks.address} within {LIMIT_S:g} s",
                    )
                ) from None
            # Nothing is read from this connection after the handshake, so the timeout is for that.
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _CALLER_TIMEOUT)
            connection = _connection(caller)
            try:
                deliver_challenge(connection, secret.encode())
                answer_challenge(connection, secret.encode())
                hello = json.loads(connection.recv_bytes(_HELLO_BYTES))
            except (AuthenticationError, EOFError, OSError):
                connection.close()  # a caller without the secret, or one that gave up
                continue
            arrivals.add(hello, address[0], connection)
    return arrivals.links


def join_hosts(ranks: Ranks, store: TCPStore, terms: Terms) -> HostLinks:
    """Returns the links from this host, which is not the first, to rank 0.

    Raises:
        SettingsError: the first host has another secret, or is gone.
    """
    host, _ = _host_and_port(ranks.address)
    try:
        invitation = json.loads(store.get(_KEY))
        secret = terms.secret or invitation["secret"]
        if secret is None:
            raise AuthenticationError("this host has none")
        connections: dict[int | None, Connection] = {}
        for rank in (None, *ranks.here):
            call = socket.create_connection((host, invitation["port"]), LIMIT_S)
            call.settimeout(None)
            connections[rank] = connection = _connection(call)
            answer_challenge(connection, secret.encode())
            deliver_challenge(connection, secret.encode())
            settings = dict(terms.settings) if rank is None else {}
            hello = {"host": ranks.host, "rank": rank, "settings": settings}
            connection.send_bytes(json.dumps(hello).encode())
    except AuthenticationError as error:
        raise SettingsError((f"--dist-secret is not that of {ranks.address}: {error}",)) from error
    except (RuntimeError, OSError, EOFError) as error:
        raise SettingsError(
            (f"the first host, {ranks.address}, is gone, and its log may say why: {error}",)
        ) from error
    control = connections.pop(None)
    pipes = {rank: pipe for rank, pipe in connections.items() if rank is not None}
    return HostLinks(f"the first host, {ranks.address}", control, pipes)


class _Arrivals:
    """The connections from other hosts so far."""

    def __init__(self, ranks: Ranks, terms: Terms) -> None:
        self._ranks, self._terms = ranks, terms
        self._connections: dict[tuple[int, int | None], Connection] = {}
        self._names: dict[int, str] = {}

    @property
    def missing(self) -> list[int]:
        """Hosts that have not made all of their connections."""
        return [
            host
            for host in range(1, self._ranks.num_hosts)
            if any(key not in self._connections for key in self._keys(host))
        ]

    @property
    def links(self) -> list[HostLinks]:
        """The links to all other hosts, when none is missing."""
        return [
            HostLinks(
                self._names[host],
                self._connections[host, None],
                {
                    rank: self._connections[host, rank]
                    for _, rank in self._keys(host)
                    if rank is not None
                },
            )
            for host in range(1, self._ranks.num_hosts)
        ]

    def add(self, hello: Mapping[str, Any], address: str, connection: Connection) -> None:
        """Adds a connection of a host.

        Raises:
            SettingsError: there is one from the same host and rank, or the settings differ.
        """
        host, rank = hello["host"], hello["rank"]
        name = f"--node-rank {host} ({address})"
        if (host, rank) in self._connections:
            raise SettingsError((f"two hosts say that they are --node-rank {host}",))
        if rank is None:
            self._check(hello["settings"], name)
            self._names[host] = name
        self._connections[host, rank] = connection

    def _keys(self, host: int) -> list[tuple[int, int | None]]:
        here = range(host * self._ranks.num_here, (host + 1) * self._ranks.num_here)
        return [(host, None), *((host, rank) for rank in here)]

    def _check(self, remote: Mapping[str, str], name: str) -> None:
        local = self._terms.settings
        problems = tuple(
            f"{key} is {local.get(key)!r} here and {remote.get(key)!r} on {name}; hosts take the "
            f"same command line but for --node-rank"
            for key in sorted(local.keys() | remote.keys())
            if local.get(key) != remote.get(key)
        )
        raise_problems(problems)


def _listener(host: str, ranks: Ranks) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=ranks.size)
    except OSError as error:
        problem = f"--dist-init-addr is {ranks.address}, which is no address of this host: {error}"
        raise SettingsError((problem,)) from error


def _connection(end: socket.socket) -> Connection:
    """Returns the socket as a pipe. Messages are small and urgent, so TCP does not batch them."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # Linux
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(end.detach())


def _host_and_port(address: str | None) -> tuple[str, int]:
    if address is None:
        return _LOOPBACK, 0
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
