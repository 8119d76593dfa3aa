"""Settings of a process: frozen dataclasses filled from defaults, the environment and flags.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class DraftSettings(ProcessSettings):
        port: int = setting(50061, "port of DraftService", minimum=0, maximum=65535)
        targets: tuple[str, ...] = setting((), "targets to dial, host:port")

    settings = load_settings(DraftSettings, service="draft", arguments=sys.argv[1:], env=os.environ)

The field `max_running_requests` is the flag `--max-running-requests`, which beats the file of
`--config`, which beats the variable `OUTRIDER_DRAFT_MAX_RUNNING_REQUESTS`, which beats the default.
All invalid settings are reported at once, by name, with the values that are valid."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from shared.errors import SettingsError, raise_problems
from shared.settings_field import REQUIRED, Field, declared_fields, setting
from shared.telemetry.logs import LogFormat
from shared.tls import ClientTls, ServerTls, checked_client_tls, checked_server_tls

if TYPE_CHECKING:
    from shared.settings_parser import FlagParser

__all__ = [
    "REQUIRED",
    "ProcessSettings",
    "flag_words",
    "load_settings",
    "setting",
    "shown_settings",
    "split_arguments",
    "unknown_name",
    "value_problems",
]

ENV_PREFIX = "OUTRIDER_"
# Share of characters, in the same order, that a misspelt name has in common with the right one.
_FEWEST_SHARED = 0.75
S = TypeVar("S")

# Schemes whose names end with a port; gRPC takes 443 if it is missing.
_DNS_SCHEME = re.compile(r"^dns:(//[^/]*/)?")
_IP_SCHEME = re.compile(r"ipv[46]:")
# Schemes whose names have no port; gRPC checks them when it dials.
_SCHEMES_WITHOUT_PORT = re.compile(r"(unix|unix-abstract|vsock|xds):.")
_HOST_AND_PORT = re.compile(r"(\[[^\[\]\s]+\]|[^\s:/\[\],]+):(?P<port>\d{1,5})")
_MAX_PORT = 65535


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings of every process; the settings of a service extend it."""

    log_level: str = setting(
        "info",
        "least severe log lines to write",
        choices=("debug", "info", "warning", "error"),
        is_shared=True,
    )
    log_format: LogFormat = setting(
        LogFormat.TEXT, "a readable line or a JSON object for each record", is_shared=True
    )


def load_settings(
    cls: type[S], *, service: str, arguments: Sequence[str], env: Mapping[str, str]
) -> S:
    """Returns the settings of a service; `--help` prints them and exits.

    Args:
        cls: dataclass whose fields are made by `setting`. Its `__post_init__` may raise
            `SettingsError` for problems that concern several fields.
        service: `target`, `draft` or `gateway`: the middle of the names of its variables.
        arguments: flags, without the name of the program.
        env: only `OUTRIDER_*` is read; an empty variable counts as not set.

    Raises:
        SettingsError: one line for each problem.
    """
    values, problems = _values(cls, service, arguments, env, {})
    raise_problems(problems)
    return cls(**values)


def value_problems(
    cls: type,
    *,
    service: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    typed: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Returns a line for each problem that `load_settings` finds before settings are made, which is
    all that can be said without settings of others.

    Args:
        typed: the name under which a flag was typed, where that is not the one in `arguments`.
    """
    return _values(cls, service, arguments, env, typed)[1]


def _values(
    cls: type,
    service: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    typed: Mapping[str, str],
) -> tuple[dict[str, Any], list[str]]:
    """Returns the values by name of the field, and a line for each problem."""
    fields, parser = declared_fields(cls), _parser(cls, service)
    sources = _variables(fields, service, env)
    variables = {_variable(service, flag): env[name] for flag, name in sources.items()}
    from_env = parser.read((), variables).flags
    given = parser.read(arguments)
    names = given.typed | dict(typed)
    problems = [f"unexpected argument {text!r}" for text in given.strays]
    known = [name for field in fields for name in field.names]
    problems += [unknown_name(flag, known) for flag in given.unknown]
    problems += _unknown_variables(fields, service, env)
    values = _parsed(fields, from_env, sources, problems)
    values |= _parsed(fields, given.flags, {f: names.get(f, f) for f in given.flags}, problems)
    problems += [
        f"{field.flag} is required: {field.help}"
        for field in fields
        if field.is_required and field.flag not in from_env | given.flags
    ]
    return values, problems


def split_arguments(cls: type, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the flags that `cls` declares, and all other flags, each as `--flag=value`.

    For a process that hosts a second component with its own settings. Words that belong to no flag
    stay with the declared ones.
    """
    given = _parser(cls, "target").read(arguments)
    return [*given.strays, *flag_words(given.flags)], flag_words(given.unknown)


def flag_words(flags: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns flags and their values as words of a command line."""
    return [
        word
        for flag, texts in flags.items()
        for word in [f"{flag}={text}" for text in texts] or [flag]
    ]


def shown_settings(settings: object) -> dict[str, str]:
    """Returns every setting by flag name, without dashes, as text; secrets are left out."""
    return {
        field.flag.removeprefix("--"): field.render(getattr(settings, field.name))
        for field in declared_fields(type(settings))
        if not field.is_secret
    }


def unknown_name(name: str, known: Iterable[str], prefix: str = "--") -> str:
    """Returns the message for an unknown flag or variable, with the known name that it misspells,
    if there is one.

    Args:
        prefix: the beginning that all of the names have.
    """
    kind = "flag" if name.startswith("--") else "variable"
    own, others = name.removeprefix(prefix), [other.removeprefix(prefix) for other in known]
    close = difflib.get_close_matches(own, others, n=1, cutoff=_FEWEST_SHARED)
    hint = f"; did you mean {prefix}{close[0]}?" if close else ""
    return f"unknown {kind} {name}{hint}"


@functools.cache
def _parser(cls: type, service: str) -> FlagParser:
    from shared.settings_parser import FlagParser  # settings made in code need no ConfigArgParse

    fields = declared_fields(cls)
    parser = FlagParser(
        f"outrider-{service}",
        (cls.__doc__ or "").partition("\n")[0],
        f"Each flag has a variable: {fields[0].flag} is {_variable(service, fields[0].flag)}.",
    )
    for field in fields:
        parser.add(field, variable=_variable(service, field.flag))
    return parser


def _variable(service: str, flag: str) -> str:
    name = flag.removeprefix("--").replace("-", "_").upper()
    return f"{ENV_PREFIX}{service.upper()}_{name}" if service else ENV_PREFIX + name


def _variables(fields: Sequence[Field], service: str, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that sets each flag; that of a service beats the shared one."""
    shared = {field.flag: _variable("", field.flag) for field in fields if field.is_shared}
    of_service = {field.flag: _variable(service, field.flag) for field in fields}
    names = [*shared.items(), *of_service.items()]
    return {flag: name for flag, name in names if env.get(name)}


def _unknown_variables(fields: Sequence[Field], service: str, env: Mapping[str, str]) -> list[str]:
    known = [_variable(service, field.flag) for field in fields]
    prefix = _variable(service, "")
    names = sorted(name for name in env if name.startswith(prefix) and name not in known)
    return [unknown_name(name, known, prefix) for name in names]


def _parsed(
    fields: Sequence[Field],
    flags: Mapping[str, Sequence[str]],
    sources: Mapping[str, str],
    problems: list[str],
) -> dict[str, Any]:
    """Returns the values by name of the field; adds a line for each bad value to `problems`."""
    values: dict[str, Any] = {}
    for field in fields:
        texts = flags.get(field.flag)
        if texts is None:
            continue
        source = sources[field.flag]
        if not texts:
            problems.append(f"{source} needs a value")
            continue
        try:
            values[field.name] = field.parse(texts)
        except ValueError as error:
            shown = "(not shown)" if field.is_secret else repr(",".join(texts))
            problems.append(f"{source} is {shown}; it must be {error}")
    return values


def is_loopback(host: str) -> bool:
    """Returns whether an IP address is this host's own. A Unix socket has an empty one."""
    try:
        return not host or ip_address(host).is_loopback
    except ValueError:
        return False


def address_problems(flag: str, addresses: Iterable[str]) -> tuple[str, ...]:
    """Returns a line for each address that gRPC would reject, or take for another address."""
    return tuple(
        f"{flag} is {address!r}; it must be HOST:PORT with a port in [1, {_MAX_PORT}], or unix:PATH"
        for address in addresses
        if not _is_unambiguous(address)
    )


def _is_unambiguous(address: str) -> bool:
    if _SCHEMES_WITHOUT_PORT.match(address):
        return True
    literals = _IP_SCHEME.match(address)
    if literals is not None:
        return all(map(_has_port, address[literals.end() :].split(",")))
    return _has_port(_DNS_SCHEME.sub("", address, count=1))


def _has_port(name: str) -> bool:
    match = _HOST_AND_PORT.fullmatch(name)
    return match is not None and 1 <= int(match["port"]) <= _MAX_PORT


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
    """Returns a line for each TLS setting that is invalid.

    Args:
        others: read further TLS settings of one service.
    """
    problems: dict[str, None] = {}  # in order, each once
    target = (lambda: settings.target_tls,) if isinstance(settings, DialingSettings) else ()
    for read in (lambda: settings.server_tls, *target, *others):
        try:
            read()
        except SettingsError as error:
            problems.update(dict.fromkeys(error.problems))
    return tuple(problems)
