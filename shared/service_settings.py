"""Settings that the three services share: TLS of their servers and of their way to the targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.errors import SettingsError
from shared.settings import ProcessSettings, setting
from shared.tls import ClientTls, ServerTls, checked_client_tls, checked_server_tls


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings(ProcessSettings):
    """Settings of a process that serves gRPC."""

    tls_cert: Path | None = setting(
        None, "certificate chain of the servers (PEM); no TLS when unset", is_shared=True
    )
    tls_key: Path | None = setting(None, "key of --tls-cert (PEM)", is_shared=True)
    tls_client_ca: Path | None = setting(
        None,
        "certificate authority of gRPC clients (PEM), which must then present a certificate",
        is_shared=True,
    )

    otlp_endpoint: str | None = setting(
        None,
        "OpenTelemetry collector for traces, OTLP over gRPC (http://host:4317); off when unset",
        is_shared=True,
    )
    trace_sample_ratio: float = setting(
        1.0,
        "share of traces sampled; a trace with a parent follows its parent",
        minimum=0.0,
        maximum=1.0,
        is_shared=True,
    )

    round_log: Path | None = setting(
        None, "JSON lines file of the times of every step and message; grows fast"
    )

    @property
    def server_tls(self) -> ServerTls | None:
        """Raises:
        SettingsError: see `checked_server_tls`.
        """
        return checked_server_tls(
            self.tls_cert, self.tls_key, self.tls_client_ca, ca_flag="--tls-client-ca"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DialingSettings(ServiceSettings):
    """Settings of a process that connects to targets."""

    target_tls_ca: Path | None = setting(
        None, "certificate authority of the targets (PEM); no TLS when unset", is_shared=True
    )
    target_tls_cert: Path | None = setting(
        None, "certificate shown to the targets (PEM)", is_shared=True
    )
    target_tls_key: Path | None = setting(None, "key of --target-tls-cert (PEM)", is_shared=True)
    target_tls_name: str | None = setting(
        None, "name in the targets' certificate; the host of --target", is_shared=True
    )

    @property
    def target_tls(self) -> ClientTls | None:
        """Raises:
        SettingsError: see `checked_client_tls`.
        """
        return checked_client_tls(
            self.target_tls_ca,
            self.target_tls_cert,
            self.target_tls_key,
            self.target_tls_name,
            prefix="--target-tls-",
        )


def tls_problems(
    settings: ServiceSettings, *others: Callable[[], ServerTls | None]
) -> tuple[str, ...]:
    """Returns a line for each TLS setting that cannot work, none when all is well.

    Args:
        others: further ways to use TLS that only one service has.
    """
    problems: dict[str, None] = {}  # in order, each once
    for read in (lambda: settings.server_tls, lambda: _target_tls(settings), *others):
        try:
            read()
        except SettingsError as error:
            problems.update(dict.fromkeys(error.problems))
    return tuple(problems)


def _target_tls(settings: ServiceSettings) -> ClientTls | None:
    return settings.target_tls if isinstance(settings, DialingSettings) else None
