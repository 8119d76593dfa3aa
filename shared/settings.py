"""Settings of a process: frozen dataclasses filled from defaults, the environment and flags.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class DraftSettings(ProcessSettings):
        port: int = setting(50061, "port of DraftService", minimum=0, maximum=65535)
        targets: tuple[str, ...] = setting((), "targets to dial, host:port")

    settings = load_settings(DraftSettings, service="draft", arguments=sys.argv[1:], env=os.environ)

The field `max_running_requests` is the flag `--max-running-requests`, which beats the variable
`OUTRIDER_DRAFT_MAX_RUNNING_REQUESTS`, which beats the default. Everything that is wrong is reported
at once, by name, with what would have been right.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from shared.errors import SettingsError
from shared.settings_argv import Syntax, scan
from shared.settings_field import REQUIRED, Field, declared_fields, setting
from shared.settings_help import help_text
from shared.telemetry.logs import LogFormat

__all__ = [
    "REQUIRED",
    "ProcessSettings",
    "load_settings",
    "setting",
    "shown_settings",
    "split_arguments",
]

ENV_PREFIX = "OUTRIDER_"
S = TypeVar("S")


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
            `SettingsError` for what concerns several fields.
        service: `target`, `draft` or `gateway`: the middle of the names of its variables.
        arguments: flags, without the name of the program.
        env: only `OUTRIDER_*` is read; an empty variable counts as not set.

    Raises:
        SettingsError: one line for each thing that is wrong.
    """
    fields = declared_fields(cls)
    if "--help" in arguments or "-h" in arguments:
        _print_help_and_exit(cls, fields, service)
    problems: list[str] = []
    from_env = _read_env(fields, env, service, problems)
    from_flags = _read_arguments(fields, arguments, problems)
    values = _parsed(fields, from_env, problems) | _parsed(fields, from_flags, problems)
    problems += [
        f"{field.flag} is required: {field.help}"
        for field in fields
        if field.is_required and field.name not in from_env | from_flags
    ]
    if problems:
        raise SettingsError(tuple(problems))
    return cls(**values)


def split_arguments(cls: type, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the flags that `cls` declares and the others, each as `--flag=value`.

    For a process that hosts a second component with settings of its own. Words that belong to no
    flag, and `--help`, stay with the first.
    """
    fields = declared_fields(cls)
    declared = {field.flag for field in fields} | {"--help"}
    scanned = scan(arguments, Syntax.of(fields))
    own, other = list(scanned.strays), list[str]()
    for flag, texts in scanned.flags.items():
        words = [f"{flag}={text}" for text in texts] or [flag]
        (own if flag in declared else other).extend(words)
    return own, other


def shown_settings(settings: object) -> dict[str, str]:
    """Returns every setting by flag name, without dashes, as text; secrets are left out."""
    return {
        field.flag.removeprefix("--"): field.render(getattr(settings, field.name))
        for field in declared_fields(type(settings))
        if not field.is_secret
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """Texts for one setting.

    Attributes:
        source: the flag or variable they were given by.
    """

    source: str
    texts: Sequence[str]


def _read_env(
    fields: Sequence[Field], env: Mapping[str, str], service: str, problems: list[str]
) -> dict[str, _Given]:
    own_prefix = f"{ENV_PREFIX}{service.upper()}_"
    names = {ENV_PREFIX + field.variable: field for field in fields if field.is_shared}
    # After the shared ones, so that a service's own variable wins.
    names |= {own_prefix + field.variable: field for field in fields}
    given: dict[str, _Given] = {}
    for variable, field in names.items():
        if env.get(variable):
            texts = env[variable].split(",") if field.is_repeated else [env[variable]]
            given[field.name] = _Given(variable, texts)
    problems += [
        f"{variable} is not a setting{_hint(variable, names)}"
        for variable in sorted(env)
        if variable.startswith(own_prefix) and variable not in names
    ]
    return given


def _read_arguments(
    fields: Sequence[Field], arguments: Sequence[str], problems: list[str]
) -> dict[str, _Given]:
    scanned = scan(arguments, Syntax.of(fields))
    problems += [f"unexpected argument {text!r}" for text in scanned.strays]
    by_flag = {field.flag: field for field in fields}
    given: dict[str, _Given] = {}
    for flag, texts in scanned.flags.items():
        field = by_flag.get(flag)
        if field is None:
            problems.append(f"{flag} is not a setting{_hint(flag, by_flag)}")
            continue
        given[field.name] = _Given(flag, texts if field.is_repeated else texts[-1:])
        if not texts:
            problems.append(f"{flag} needs a value")
    return given


def _parsed(
    fields: Sequence[Field], given: Mapping[str, _Given], problems: list[str]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in fields:
        if field.name not in given or not given[field.name].texts:
            continue
        source, texts = given[field.name].source, given[field.name].texts
        try:
            values[field.name] = field.parse(texts)
        except ValueError as error:
            shown = "(not shown)" if field.is_secret else repr(",".join(texts))
            problems.append(f"{source} is {shown}; it must be {error}")
    return values


def _hint(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def _print_help_and_exit(cls: type, fields: Sequence[Field], service: str) -> NoReturn:
    prefix = f"{ENV_PREFIX}{service.upper()}_"
    epilog = f"Each flag has a variable: {fields[0].flag} is {prefix}{fields[0].variable}."
    print(help_text(cls, {"": fields}, program=f"outrider-{service}", epilog=epilog))
    sys.exit(0)
