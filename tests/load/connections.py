"""How the load programs reach a gRPC server: address and TLS."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from grpc import aio

from shared.rpc.channel import open_channel
from shared.tls import CertFolder

Run = Callable[[argparse.Namespace], Coroutine[Any, Any, str]]


def add_connection_flags(parser: argparse.ArgumentParser, *, address: str) -> None:
    parser.add_argument("--address", default=address, help="host:port")
    parser.add_argument("--certs", type=Path, help="folder of `make certs`, for mutual TLS")


def run_program(name: str, flags: argparse.Namespace, run: Run) -> int:
    """Prints what a program returns, or why its server does not answer; returns the exit code."""
    try:
        print(asyncio.run(run(flags)))
    except aio.AioRpcError as failure:
        print(f"{name}: {flags.address}: {failure.details()}", file=sys.stderr)
        return 1
    return 0


def connect(flags: argparse.Namespace) -> aio.Channel:
    """Returns a channel to `--address`."""
    tls = None if flags.certs is None else CertFolder(flags.certs).client_tls()
    return open_channel(flags.address, tls)
