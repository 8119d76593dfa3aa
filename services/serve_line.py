"""Assigns each flag of `outrider serve` to the service that it belongs to.

A flag that one service has goes to that service. A flag that several services have goes where
SGLang's meaning puts it: `--host` and `--port` to the gateway, `--dtype` to target and draft.
`--target-X`, `--draft-X` and `--gateway-X` set flag X of that service alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from gateway.settings import GatewaySettings
from services.draft.settings import DraftSettings
from services.serve_settings import (
    LauncherSettings,
    SglangSettings,
    refusal,
    without_command,
    without_prefix,
)
from services.target.settings import TargetSettings
from shared.settings import flag_words, unknown_name
from shared.settings_field import Field, declared_fields
from shared.settings_parser import FlagParser

LAUNCHER, TARGET, DRAFT, GATEWAY = "serve", "target", "draft", "gateway"
_ALL = (TARGET, DRAFT, GATEWAY)
_FIELDS: Mapping[str, tuple[Field, ...]] = MappingProxyType(
    {
        TARGET: tuple(field for field in declared_fields(TargetSettings) if field.name != "draft"),
        DRAFT: declared_fields(DraftSettings),
        GATEWAY: declared_fields(GatewaySettings),
    }
)
_LAUNCHER_FIELDS = declared_fields(LauncherSettings)

# Owners of the flags that several services have. A draft in the target's process shares the value
# of the target anyway.
_OWNERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("--host", "--port"), (GATEWAY,)),
        **dict.fromkeys(("--dtype", "--device", "--page-size", "--num-threads"), (TARGET, DRAFT)),
        **dict.fromkeys(("--max-running-requests", "--disable-radix-cache"), (TARGET, DRAFT)),
        **dict.fromkeys(
            ("--tp-size", "--mem-fraction-static", "--max-total-tokens", "--context-length"),
            (TARGET,),
        ),
        **dict.fromkeys(("--chunked-prefill-size", "--target-model-path"), (TARGET,)),
        "--tokenizer-path": (TARGET, GATEWAY),
        "--tokenizer": (TARGET, GATEWAY),
        "--drain-grace-s": (TARGET, GATEWAY),
        **dict.fromkeys(("--log-level", "--log-format", "--otlp-endpoint"), _ALL),
        **dict.fromkeys(("--tls-cert", "--tls-key", "--tls-client-ca"), _ALL),
        "--trace-sample-ratio": _ALL,
        **dict.fromkeys(
            ("--target-tls-ca", "--target-tls-cert", "--target-tls-key", "--target-tls-name"),
            (DRAFT, GATEWAY),
        ),
    }
)
_RENAMED: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        (TARGET, "--target-model-path"): "--model-path",
        (TARGET, "--tokenizer"): "--tokenizer-path",
        (GATEWAY, "--tokenizer-path"): "--tokenizer",
    }
)
_EPILOG = (
    "--target-X, --draft-X and --gateway-X set X of one service alone. Each flag of a service has "
    "a variable: --max-total-tokens of the target is OUTRIDER_TARGET_MAX_TOTAL_TOKENS. A flag "
    "beats the file, which beats the variable."
)
_MODEL_NAME_FLAGS = ("--served-model-name", "--target-served-model-name")
_PER_SERVICE = ("--maintenance-host", "--maintenance-port", "--metrics-port", "--round-log")


@dataclass(frozen=True, slots=True)
class Line:
    """The flags of a launch line by owner, as `--flag=value`.

    Attributes:
        own: flags of the launcher.
        services: flags of each service.
        typed: the names under which the flags of each service were typed.
        problems: a line for each flag that has no owner.
    """

    own: list[str] = field(default_factory=list)
    services: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in _ALL})
    typed: dict[str, dict[str, str]] = field(
        default_factory=lambda: {name: {} for name in (LAUNCHER, *_ALL)}
    )
    problems: list[str] = field(default_factory=list)


def split_line(arguments: Sequence[str]) -> Line:
    """Assigns the flags of a launch line, and of its `--config` file, to their owners.

    Raises:
        SettingsError: the file cannot be read, or holds something other than flags.
    """
    given = _parser().read(without_prefix(without_command(arguments)))
    line = Line()
    line.problems.extend(f"unexpected argument {text!r}" for text in given.strays)
    for flag, texts in (given.flags | given.unknown).items():
        _assign(flag, texts, given.typed.get(flag, flag), line)
    return line


def help_text() -> str:
    """Returns `outrider serve --help`: every flag, by the service that it belongs to."""
    return _parser().help()


def all_fields() -> Mapping[str, tuple[Field, ...]]:
    """Returns every flag by service; the launcher's have an empty name."""
    return {"": _LAUNCHER_FIELDS, **_FIELDS}


def _assign(flag: str, texts: Sequence[str], typed: str, line: Line) -> None:
    """Args:
    typed: the name under which the flag was typed.
    """
    if reason := refusal(flag, texts):
        line.problems.append(reason)
        return
    if flag in _MODEL_NAME_FLAGS:
        texts = _first_name(texts, line)
    if flag in {field.flag for field in _LAUNCHER_FIELDS}:
        line.own.extend(flag_words({flag: texts}))
        line.typed[LAUNCHER][flag] = typed
        return
    owned = [(service, _RENAMED.get((service, flag), flag)) for service in _owners(flag)]
    service, _, rest = flag.removeprefix("--").partition("-")
    if not owned and f"--{rest}" in {field.flag for field in _FIELDS.get(service, ())}:
        owned = [(service, f"--{rest}")]
    for service, name in owned:
        line.services[service].extend(flag_words({name: texts}))
        line.typed[service][name] = typed
    if not owned:
        line.problems.append(_problem(flag))


def _first_name(texts: Sequence[str], line: Line) -> list[str]:
    """Returns the model's name; further names, which vLLM allows, become the gateway's aliases."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    line.services[GATEWAY].extend(flag_words({"--model-alias": names[1:]} if names[1:] else {}))
    return names[:1]


def _owners(flag: str) -> tuple[str, ...]:
    if flag in _OWNERS:
        return _OWNERS[flag]
    owners = tuple(name for name in _ALL if flag in {field.flag for field in _FIELDS[name]})
    return owners if len(owners) == 1 else ()


def _problem(flag: str) -> str:
    if flag in _PER_SERVICE:
        return f"{flag}: each service has its own: --target{flag[1:]}, --draft{flag[1:]}, …"
    if flag == "--target":
        return (
            "--target: the target is started here; for one that runs, use `outrider gateway "
            "--target` and `outrider draft --target`"
        )
    fields = [field for fields in all_fields().values() for field in fields]
    return unknown_name(flag, [name for field in fields for name in field.names])


@functools.cache
def _parser() -> FlagParser:
    """Returns the parser of all flags; its help lists each by its name in a launch line."""
    parser = FlagParser("outrider serve", LauncherSettings.__doc__ or "", _EPILOG)
    sglang_fields = declared_fields(SglangSettings)
    listed: dict[str, tuple[tuple[str, ...], Field]] = {
        option.flag: ((), option) for option in _LAUNCHER_FIELDS if option not in sglang_fields
    }
    owned = [
        (owners, option)
        for service, fields in _FIELDS.items()
        for option in fields
        if service in (owners := _owners(option.flag))
    ]
    for owners, option in sorted(owned, key=lambda pair: len(pair[0])):
        listed.setdefault(option.flag, (owners, option))
    listed |= {option.flag: (("SGLang, for its launch lines",), option) for option in sglang_fields}
    taken = set(listed)
    for owners, option in listed.values():
        aliases = tuple(alias for alias in option.aliases if alias not in taken)
        parser.add(_as_parsed(replace(option, aliases=aliases)), title=_title(owners))
        taken.update(aliases)
    for service, fields in _FIELDS.items():
        for option in fields:
            prefixed = _as_parsed(replace(option, flag=f"--{service}{option.flag[1:]}", aliases=()))
            if prefixed.flag not in taken:
                is_listed = service not in _owners(option.flag)
                parser.add(prefixed, title=_title((service,)), is_listed=is_listed)
    return parser


def _as_parsed(field: Field) -> Field:
    """Returns a field as the launcher parses it: it accepts several names of the model."""
    return replace(field, is_repeated=field.is_repeated or field.flag in _MODEL_NAME_FLAGS)


def _title(owners: Sequence[str]) -> str:
    return f"flags of {' and '.join(owners)}" if owners else ""
