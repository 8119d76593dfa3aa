"""`make serve`: target, draft and gateway as child processes, stopped together.

Prints one line on stdout when requests are answered. SIGINT or SIGTERM stops gateway, draft and
target in that order. A draft that dies is started again; without gateway or target the stack ends
with exit code 1. Nothing here loads a model.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from services import probe
from services.child import Child, ChildSpec
from services.draft.algorithm import Algorithm
from services.stack import Part, Patience, Stack
from shared.tls import ClientTls

_HOST = "127.0.0.1"
_NO_DRAFT = "NONE"
_DEMO_NAME = "demo"


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What to serve and where.

    Attributes:
        model: folder of the target model; None is the demo model.
        draft_model: folder of the draft model; None is the demo draft.
        algorithms: drafters, as `--speculative-algorithm` spells them; none decodes plainly.
        placement: `remote` (the draft is a process) or `embedded` (it lives in the target's).
        dtype: of weights and activations; None is the services' default.
        gateway_port, target_port, draft_port: each service takes the next port for maintenance;
            further drafts follow the first.
        log_dir: one file per process.
        certs: folder that `make certs` wrote; every connection speaks TLS, and gRPC mutually.
    """

    model: Path | None
    draft_model: Path | None
    algorithms: tuple[str, ...]
    placement: str
    dtype: str | None
    gateway_port: int
    target_port: int
    draft_port: int
    log_dir: Path
    patience: Patience
    certs: Path | None = None

    @property
    def draft_ports(self) -> dict[str, int]:
        """The port of each draft process, by its algorithm."""
        remote = self.algorithms if self.placement == "remote" else ()
        return {each: self.draft_port + 2 * place for place, each in enumerate(remote)}

    @property
    def ports(self) -> tuple[int, ...]:
        """Every port of the stack; maintenance is one above each service."""
        services = [self.gateway_port, self.target_port, *self.draft_ports.values()]
        return tuple(port for service in services for port in (service, service + 1))


def parse(arguments: Sequence[str]) -> ServeSettings:
    """Reads flags. Exits with code 2 and the problem on stderr when they are wrong."""
    parser = argparse.ArgumentParser(prog="serve", description=__doc__)
    parser.add_argument("--model", type=_folder, help="target model folder (default: demo model)")
    parser.add_argument("--draft-model", type=_folder, help="draft model folder")
    parser.add_argument(
        "--algorithm",
        type=_algorithms,
        help="STANDALONE, NGRAM, EAGLE3, …, NONE; several by comma, each a draft of its own",
    )
    parser.add_argument("--placement", choices=("remote", "embedded"), default="remote")
    parser.add_argument("--dtype", help="float32, bfloat16, …")
    parser.add_argument("--gateway-port", type=int, default=8000)
    parser.add_argument("--target-port", type=int, default=50051)
    parser.add_argument("--draft-port", type=int, default=50061)
    parser.add_argument("--log-dir", type=Path, default=Path(".run"))
    parser.add_argument("--certs", type=_certs, help="folder of `make certs`: TLS everywhere")
    parser.add_argument("--start-timeout-s", type=float, default=Patience().start_s)
    parser.add_argument("--stop-grace-s", type=float, default=Patience().stop_s)
    flags = parser.parse_args(arguments)
    algorithms = flags.algorithm or (_default_algorithm(flags.model, flags.draft_model),)
    if len(algorithms) > 1:
        if flags.placement == "embedded":
            parser.error(f"a target embeds one draft; --algorithm names {len(algorithms)}")
        if flags.draft_model is not None:
            parser.error(f"--draft-model is of one draft; --algorithm names {len(algorithms)}")
    return ServeSettings(
        model=flags.model,
        draft_model=flags.draft_model,
        algorithms=tuple(each for each in algorithms if each != _NO_DRAFT),
        placement=flags.placement,
        dtype=flags.dtype,
        gateway_port=flags.gateway_port,
        target_port=flags.target_port,
        draft_port=flags.draft_port,
        log_dir=flags.log_dir,
        patience=Patience(start_s=flags.start_timeout_s, stop_s=flags.stop_grace_s),
        certs=flags.certs,
    )


def _folder(text: str) -> Path:
    path = Path(text)
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a model folder: it has no config.json")
    return path.resolve()


def _algorithms(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.strip() for each in text.upper().split(",") if each.strip()))


def _certs(text: str) -> Path:
    path = Path(text)
    if not (path / "ca.pem").is_file():
        raise argparse.ArgumentTypeError(f"{path} has no ca.pem; `make certs` writes one")
    return path.resolve()


def _default_algorithm(model: Path | None, draft_model: Path | None) -> str:
    """The demo draft fits the demo model only; another model drafts from its own text."""
    return "STANDALONE" if model is None or draft_model is not None else "NGRAM"


def _target(settings: ServeSettings) -> ChildSpec:
    arguments = ["--port", str(settings.target_port), *_flag("--dtype", settings.dtype)]
    arguments += _server_tls(settings)
    if settings.model is None:
        arguments += ["--served-model-name", _DEMO_NAME]
    else:
        arguments += ["--model-path", str(settings.model)]
    if settings.placement == "embedded":
        for algorithm in settings.algorithms:
            arguments += ["--draft", settings.placement, *_drafter(settings, algorithm)]
    return _spec(settings, "target", "services.target", arguments)


def draft_spec(settings: ServeSettings, algorithm: str) -> ChildSpec:
    """Returns a draft's process; a head is told the folder of its target."""
    port = settings.draft_ports[algorithm]
    arguments = ["--port", str(port), "--maintenance-port", str(port + 1)]
    arguments += ["--target", f"{_HOST}:{settings.target_port}"]
    arguments += _drafter(settings, algorithm) + _flag("--dtype", settings.dtype)
    arguments += _server_tls(settings) + _target_tls(settings)
    if algorithm in {each.value for each in Algorithm if each.reads_features}:
        arguments += _flag("--target-model-path", settings.model)
    name = "draft" if len(settings.algorithms) == 1 else f"draft-{algorithm.lower()}"
    return _spec(settings, name, "services.draft", arguments)


def _gateway(settings: ServeSettings) -> ChildSpec:
    arguments = ["--port", str(settings.gateway_port)]
    arguments += ["--target", f"{_HOST}:{settings.target_port}"]
    arguments += _flag("--tokenizer", settings.model)
    arguments += _server_tls(settings) + _target_tls(settings)
    return _spec(settings, "gateway", "gateway", arguments)


def _drafter(settings: ServeSettings, algorithm: str) -> list[str]:
    return [
        *_flag("--speculative-algorithm", algorithm),
        *_flag("--speculative-draft-model-path", settings.draft_model),
    ]


def _server_tls(settings: ServeSettings) -> list[str]:
    if settings.certs is None:
        return []
    certs = settings.certs
    return [
        *("--tls-cert", str(certs / "server.pem"), "--tls-key", str(certs / "server-key.pem")),
        *("--tls-client-ca", str(certs / "ca.pem")),
    ]


def _target_tls(settings: ServeSettings) -> list[str]:
    tls = _client_tls(settings)
    if tls is None:
        return []
    files = ("--target-tls-cert", str(tls.cert), "--target-tls-key", str(tls.key))
    return ["--target-tls-ca", str(tls.ca), *files]


def _client_tls(settings: ServeSettings) -> ClientTls | None:
    if settings.certs is None:
        return None
    certs = settings.certs
    return ClientTls(certs / "ca.pem", certs / "client.pem", certs / "client-key.pem")


def _flag(name: str, value: object | None) -> list[str]:
    return [] if value is None else [name, str(value)]


def _spec(settings: ServeSettings, name: str, module: str, arguments: list[str]) -> ChildSpec:
    return ChildSpec(name, module, tuple(arguments), settings.log_dir / f"{name}.log")


def _services(settings: ServeSettings) -> tuple[Part, ...]:
    """Returns the parts in start order: who depends on whom goes last."""
    target, tls = f"{_HOST}:{settings.target_port}", _client_tls(settings)
    parts = [Part(Child(_target(settings)), lambda: probe.grpc_is_serving(target, tls))]
    maintenance = f"{_HOST}:{settings.target_port + 1}"
    for count, algorithm in enumerate(settings.draft_ports, start=1):
        are_attached = partial(probe.has_attachments, maintenance, count, tls)
        child = Child(draft_spec(settings, algorithm))
        parts.append(Part(child, are_attached, is_expendable=True))
    gateway = Child(_gateway(settings))
    port = settings.gateway_port
    parts.append(Part(gateway, lambda: probe.http_is_ready(_HOST, port, "/ready", tls)))
    return tuple(parts)


def _busy_ports(ports: Sequence[int]) -> tuple[int, ...]:
    """Returns the ports that something else listens on."""
    return tuple(port for port in ports if not _can_bind(port))


def _can_bind(port: int) -> bool:
    with socket.socket() as listener:
        # As the servers do, so that connections of an earlier run in TIME_WAIT are no obstacle.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_HOST, port))
        except OSError:
            return False
    return True


def _ready_line(settings: ServeSettings) -> str:
    drafts = _NO_DRAFT
    if settings.algorithms:
        drafts = f"{', '.join(settings.algorithms)} ({settings.placement})"
    scheme = "http" if settings.certs is None else "https"
    return (
        f"ready: {scheme}://{_HOST}:{settings.gateway_port}/v1"
        f"  speculation: {drafts}  logs: {settings.log_dir}/"
    )


async def _serve(settings: ServeSettings) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stack = Stack(_services(settings), settings.patience, _to_stderr)
    return await stack.run(stop, lambda: print(_ready_line(settings), flush=True))


def _to_stderr(text: str) -> None:
    print(f"serve: {text}", file=sys.stderr, flush=True)


def main() -> int:
    settings = parse(sys.argv[1:])
    busy = _busy_ports(settings.ports)
    if busy:
        _to_stderr(f"ports in use on {_HOST}: {', '.join(map(str, busy))}")
        return 1
    settings.log_dir.mkdir(parents=True, exist_ok=True)
    return asyncio.run(_serve(settings))


if __name__ == "__main__":
    sys.exit(main())
