"""Addresses to dial, as gRPC takes them. No grpc.

Source: https://github.com/grpc/grpc/blob/master/doc/naming.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Schemes of names that have a port behind them; gRPC takes 443 where it is missing.
_DNS = re.compile(r"^dns:(//[^/]*/)?")
_LITERAL = re.compile(r"ipv[46]:")
# Those whose names have no such port; whether they can be dialled is gRPC's to say.
_OTHER = re.compile(r"(unix|unix-abstract|vsock|xds):.")
_HOST_AND_PORT = re.compile(r"(\[[^\[\]\s]+\]|[^\s:/\[\],]+):(?P<port>\d{1,5})")
_MAX_PORT = 65535


def address_problems(flag: str, addresses: Iterable[str]) -> tuple[str, ...]:
    """Returns a line for each address that gRPC would take for another one, or for none."""
    return tuple(
        f"{flag} is {address!r}; it must be HOST:PORT with a port in [1, {_MAX_PORT}], or unix:PATH"
        for address in addresses
        if not _is_dialled_as_it_says(address)
    )


def _is_dialled_as_it_says(address: str) -> bool:
    if _OTHER.match(address):
        return True
    literals = _LITERAL.match(address)
    if literals is not None:
        return all(map(_has_port, address[literals.end() :].split(",")))
    return _has_port(_DNS.sub("", address, count=1))


def _has_port(name: str) -> bool:
    found = _HOST_AND_PORT.fullmatch(name)
    return found is not None and 1 <= int(found["port"]) <= _MAX_PORT
