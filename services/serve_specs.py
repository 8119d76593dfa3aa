"""The processes of `make serve`, with the flags each is started with."""

from __future__ import annotations

from services.child import ChildSpec
from services.draft.algorithm import Algorithm
from services.serve_settings import ServeSettings
from shared.tls import ClientTls

HOST = "127.0.0.1"
_DEMO_NAME = "demo"


def target_spec(settings: ServeSettings) -> ChildSpec:
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
    arguments += ["--target", f"{HOST}:{settings.target_port}"]
    arguments += _drafter(settings, algorithm) + _flag("--dtype", settings.dtype)
    arguments += _server_tls(settings) + _target_tls(settings)
    if algorithm in {each.value for each in Algorithm if each.reads_features}:
        arguments += _flag("--target-model-path", settings.model)
    name = "draft" if len(settings.algorithms) == 1 else f"draft-{algorithm.lower()}"
    return _spec(settings, name, "services.draft", arguments)


def gateway_spec(settings: ServeSettings) -> ChildSpec:
    arguments = ["--port", str(settings.gateway_port)]
    arguments += ["--target", f"{HOST}:{settings.target_port}"]
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
    tls = client_tls(settings)
    if tls is None:
        return []
    files = ("--target-tls-cert", str(tls.cert), "--target-tls-key", str(tls.key))
    return ["--target-tls-ca", str(tls.ca), *files]


def client_tls(settings: ServeSettings) -> ClientTls | None:
    if settings.certs is None:
        return None
    certs = settings.certs
    return ClientTls(certs / "ca.pem", certs / "client.pem", certs / "client-key.pem")


def _flag(name: str, value: object | None) -> list[str]:
    return [] if value is None else [name, str(value)]


def _spec(settings: ServeSettings, name: str, module: str, arguments: list[str]) -> ChildSpec:
    return ChildSpec(name, module, tuple(arguments), settings.log_dir / f"{name}.log")
