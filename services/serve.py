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
from pathlib import Path

from services import probe
from services.child import Child, ChildSpec
from services.draft.algorithm import Algorithm
from services.stack import Part, Patience, Stack

_HOST = "127.0.0.1"
_NO_DRAFT = "NONE"
_DEMO_NAME = "demo"


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What to serve and where.

    Attributes:
        model: folder of the target model; None is the demo model.
        draft_model: folder of the draft model; None is the demo draft.
        algorithm: drafter, as `--speculative-algorithm` spells it; `NONE` decodes plainly.
        placement: `remote` (the draft is a process) or `embedded` (it lives in the target's).
        dtype: of weights and activations; None is the services' default.
        gateway_port, target_port, draft_port: each service takes the next port for maintenance.
        log_dir: one file per process.
    """

    model: Path | None
    draft_model: Path | None
    algorithm: str
    placement: str
    dtype: str | None
    gateway_port: int
    target_port: int
    draft_port: int
    log_dir: Path
    patience: Patience

    @property
    def has_draft_process(self) -> bool:
        return self.placement == "remote" and self.algorithm != _NO_DRAFT

    @property
    def ports(self) -> tuple[int, ...]:
        """Every port of the stack; maintenance is one above each service."""
        services = [self.gateway_port, self.target_port]
        if self.has_draft_process:
            services.append(self.draft_port)
        return tuple(port for service in services for port in (service, service + 1))


def parse(arguments: Sequence[str]) -> ServeSettings:
    """Reads flags. Exits with code 2 and the problem on stderr when they are wrong."""
    parser = argparse.ArgumentParser(prog="serve", description=__doc__)
    parser.add_argument("--model", type=_folder, help="target model folder (default: demo model)")
    parser.add_argument("--draft-model", type=_folder, help="draft model folder")
    parser.add_argument("--algorithm", type=str.upper, help="STANDALONE, NGRAM, EAGLE3, …, NONE")
    parser.add_argument("--placement", choices=("remote", "embedded"), default="remote")
    parser.add_argument("--dtype", help="float32, bfloat16, …")
    parser.add_argument("--gateway-port", type=int, default=8000)
    parser.add_argument("--target-port", type=int, default=50051)
    parser.add_argument("--draft-port", type=int, default=50061)
    parser.add_argument("--log-dir", type=Path, default=Path(".run"))
    parser.add_argument("--start-timeout-s", type=float, default=Patience().start_s)
    parser.add_argument("--stop-grace-s", type=float, default=Patience().stop_s)
    flags = parser.parse_args(arguments)
    return ServeSettings(
        model=flags.model,
        draft_model=flags.draft_model,
        algorithm=flags.algorithm or _default_algorithm(flags.model, flags.draft_model),
        placement=flags.placement,
        dtype=flags.dtype,
        gateway_port=flags.gateway_port,
        target_port=flags.target_port,
        draft_port=flags.draft_port,
        log_dir=flags.log_dir,
        patience=Patience(start_s=flags.start_timeout_s, stop_s=flags.stop_grace_s),
    )


def _folder(text: str) -> Path:
    path = Path(text)
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a model folder: it has no config.json")
    return path.resolve()


def _default_algorithm(model: Path | None, draft_model: Path | None) -> str:
    """The demo draft fits the demo model only; another model drafts from its own text."""
    return "STANDALONE" if model is None or draft_model is not None else "NGRAM"


def _target(settings: ServeSettings) -> ChildSpec:
    arguments = ["--port", str(settings.target_port), *_flag("--dtype", settings.dtype)]
    if settings.model is None:
        arguments += ["--served-model-name", _DEMO_NAME]
    else:
        arguments += ["--model-path", str(settings.model)]
    if settings.placement == "embedded":
        arguments += ["--draft", settings.placement, *_drafter(settings)]
    return _spec(settings, "target", "services.target", arguments)


def draft_spec(settings: ServeSettings) -> ChildSpec:
    """Returns the draft's process; a head is told the folder of its target."""
    arguments = ["--port", str(settings.draft_port)]
    arguments += ["--maintenance-port", str(settings.draft_port + 1)]
    arguments += ["--target", f"{_HOST}:{settings.target_port}"]
    arguments += _drafter(settings) + _flag("--dtype", settings.dtype)
    if settings.algorithm in {each.value for each in Algorithm if each.reads_features}:
        arguments += _flag("--target-model-path", settings.model)
    return _spec(settings, "draft", "services.draft", arguments)


def _gateway(settings: ServeSettings) -> ChildSpec:
    arguments = ["--port", str(settings.gateway_port)]
    arguments += ["--target", f"{_HOST}:{settings.target_port}"]
    arguments += _flag("--tokenizer", settings.model)
    return _spec(settings, "gateway", "gateway", arguments)


def _drafter(settings: ServeSettings) -> list[str]:
    return [
        *_flag("--speculative-algorithm", settings.algorithm),
        *_flag("--speculative-draft-model-path", settings.draft_model),
    ]


def _flag(name: str, value: object | None) -> list[str]:
    return [] if value is None else [name, str(value)]


def _spec(settings: ServeSettings, name: str, module: str, arguments: list[str]) -> ChildSpec:
    return ChildSpec(name, module, tuple(arguments), settings.log_dir / f"{name}.log")


def _services(settings: ServeSettings) -> tuple[Part, ...]:
    """Returns the parts in start order: who depends on whom goes last."""
    target = f"{_HOST}:{settings.target_port}"
    parts = [Part(Child(_target(settings)), lambda: probe.grpc_is_serving(target))]
    if settings.has_draft_process:
        maintenance = f"{_HOST}:{settings.target_port + 1}"
        draft = Child(draft_spec(settings))
        parts.append(Part(draft, lambda: probe.has_attachment(maintenance), is_expendable=True))
    gateway = Child(_gateway(settings))
    port = settings.gateway_port
    parts.append(Part(gateway, lambda: probe.http_is_ready(_HOST, port, "/ready")))
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
    placement = "" if settings.algorithm == _NO_DRAFT else f" ({settings.placement})"
    return (
        f"ready: http://{_HOST}:{settings.gateway_port}/v1"
        f"  speculation: {settings.algorithm}{placement}  logs: {settings.log_dir}/"
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
