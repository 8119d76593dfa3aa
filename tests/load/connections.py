"""How the load programs reach a gRPC server: address and TLS."""

from __future__ import annotations

import argparse
from pathlib import Path

from grpc import aio

from services.certs import CertFolder
from shared.rpc.channel import open_channel


def add_connection_flags(parser: argparse.ArgumentParser, *, address: str) -> None:
    parser.add_argument("--address", default=address, help="host:port")
    parser.add_argument("--certs", type=Path, help="folder of `make certs`, for mutual TLS")


def connect(flags: argparse.Namespace) -> aio.Channel:
    """Returns a channel to `--address`."""
    tls = None if flags.certs is None else CertFolder(flags.certs).client_tls()
    return open_channel(flags.address, tls)
