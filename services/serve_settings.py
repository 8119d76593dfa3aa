"""What `make serve` is told: which models, which drafts, which ports."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.draft.algorithm import Algorithm
from services.stack import Patience

NO_DRAFT = "NONE"
_LARGEST_PORT = 65_534


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


def parse(arguments: Sequence[str], description: str | None = None) -> ServeSettings:
    """Reads flags. Exits with code 2 and the problem on stderr when they are wrong."""
    parser = argparse.ArgumentParser(prog="serve", description=description)
    parser.add_argument("--model", type=_folder, help="target model folder (default: demo model)")
    parser.add_argument("--draft-model", type=_folder, help="draft model folder")
    parser.add_argument(
        "--algorithm",
        type=_algorithms,
        help="STANDALONE, NGRAM, EAGLE3, …, NONE; several by comma, each a draft of its own",
    )
    parser.add_argument("--placement", choices=("remote", "embedded"), default="remote")
    parser.add_argument("--dtype", help="float32, bfloat16, …")
    parser.add_argument("--gateway-port", type=_port, default=8000)
    parser.add_argument("--target-port", type=_port, default=50051)
    parser.add_argument("--draft-port", type=_port, default=50061)
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
    settings = ServeSettings(
        model=flags.model,
        draft_model=flags.draft_model,
        algorithms=tuple(each for each in algorithms if each != NO_DRAFT),
        placement=flags.placement,
        dtype=flags.dtype,
        gateway_port=flags.gateway_port,
        target_port=flags.target_port,
        draft_port=flags.draft_port,
        log_dir=flags.log_dir,
        patience=Patience(start_s=flags.start_timeout_s, stop_s=flags.stop_grace_s),
        certs=flags.certs,
    )
    shared = sorted(port for port, count in Counter(settings.ports).items() if count > 1)
    if shared:
        parser.error(
            f"ports wanted twice: {', '.join(map(str, shared))}; each service takes two in a row, "
            f"from {', '.join(map(str, settings.ports[::2]))}"
        )
    return settings


def _folder(text: str) -> Path:
    path = Path(text)
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a model folder: it has no config.json")
    return path.resolve()


def _port(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no port number")
    port = int(text)
    if not 1 <= port <= _LARGEST_PORT:
        raise argparse.ArgumentTypeError(
            f"{port} is outside [1, {_LARGEST_PORT}]; the next port is taken for maintenance"
        )
    return port


def _algorithms(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(each.strip() for each in text.upper().split(",") if each.strip()))
    known = [each.value for each in Algorithm] + [NO_DRAFT]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = ", ".join(unknown) or "nothing"
        raise argparse.ArgumentTypeError(f"{what} is no algorithm; there are {', '.join(known)}")
    return names


def _certs(text: str) -> Path:
    path = Path(text)
    if not (path / "ca.pem").is_file():
        raise argparse.ArgumentTypeError(f"{path} has no ca.pem; `make certs` writes one")
    return path.resolve()


def _default_algorithm(model: Path | None, draft_model: Path | None) -> str:
    """The demo draft fits the demo model only; another model drafts from its own text."""
    return "STANDALONE" if model is None or draft_model is not None else "NGRAM"
