"""Assigns each flag of `outrider serve` to the service that it belongs to.

A flag of one service goes there. Of those that several services have, SGLang's meaning decides:
`--host` and `--port` are those of HTTP, `--dtype` holds for target and draft. `--target-X`,
`--draft-X` and `--gateway-X` set flag X of that service alone.
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
    without_prefix,
)
from services.target.settings import TargetSettings
from shared.settings import flag_words, not_a_setting
from shared.settings_field import Field, declared_fields
from shared.settings_parser import FlagParser

TARGET, DRAFT, GATEWAY = "target", "draft", "gateway"
_ALL = (TARGET, DRAFT, GATEWAY)
_FIELDS: Mapping[str, tuple[Field, ...]] = MappingProxyType(
    {
        TARGET: tuple(each for each in declared_fields(TargetSettings) if each.name != "draft"),
        DRAFT: declared_fields(DraftSettings),
        GATEWAY: declared_fields(GatewaySettings),
    }
)
_OWN = declared_fields(LauncherSettings)

# Of flags that several services have; a draft in the target's process shares the target's anyway.
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
_OTHER_NAMES: Mapping[tuple[str, str], str] = MappingProxyType(
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
_NAMES = ("--served-model-name", "--target-served-model-name")
_OF_EACH = ("--maintenance-host", "--maintenance-port", "--metrics-port", "--round-log")


@dataclass(frozen=True, slots=True)
class Line:
    """A launch line, taken apart.

    Attributes:
        own: flags of the launcher.
        services: flags of each service, as `--flag=value`.
        problems: a line for each flag that belongs nowhere.
    """

    own: list[str] = field(default_factory=list)
    services: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in _ALL})
    problems: list[str] = field(default_factory=list)


def take_apart(arguments: Sequence[str]) -> Line:
    """Sorts the flags of a launch line, and of its `--config` file, by where they belong.

    Raises:
        SettingsError: the file cannot be read, or holds something other than flags.
    """
    given = _parser().read(without_prefix(arguments))
    line = Line()
    line.problems.extend(f"unexpected argument {text!r}" for text in given.strays)
    for flag, texts in (given.flags | given.unknown).items():
        _sort(flag, texts, line)
    return line


def help_text() -> str:
    """Returns `outrider serve --help`: every flag, by the service that it belongs to."""
    return _parser().help()


def all_fields() -> Mapping[str, tuple[Field, ...]]:
    """Returns every flag by where it belongs, the launcher's own under an empty name."""
    return {"": _OWN, **_FIELDS}


def _sort(flag: str, texts: Sequence[str], line: Line) -> None:
    if flag in _NAMES:
        texts = _first_name(texts, line)
    if flag in {each.flag for each in _OWN}:
        line.own.extend(flag_words({flag: texts}))
        return
    owners = _owners(flag)
    for service in owners:
        name = _OTHER_NAMES.get((service, flag), flag)
        line.services[service].extend(flag_words({name: texts}))
    if owners:
        return
    service, _, rest = flag.removeprefix("--").partition("-")
    if service in _FIELDS and f"--{rest}" in {each.flag for each in _FIELDS[service]}:
        line.services[service].extend(flag_words({f"--{rest}": texts}))
    else:
        line.problems.append(_problem(flag))


def _first_name(texts: Sequence[str], line: Line) -> list[str]:
    """Returns the model's name; further names, as vLLM takes them, are the gateway's aliases."""
    names = [each.strip() for text in texts for each in text.split(",") if each.strip()]
    line.services[GATEWAY].extend(flag_words({"--model-alias": names[1:]} if names[1:] else {}))
    return names[:1]


def _owners(flag: str) -> tuple[str, ...]:
    if flag in _OWNERS:
        return _OWNERS[flag]
    found = tuple(name for name in _ALL if flag in {each.flag for each in _FIELDS[name]})
    return found if len(found) == 1 else ()


def _problem(flag: str) -> str:
    if flag in _OF_EACH:
        return f"{flag}: each service has its own: --target{flag[1:]}, --draft{flag[1:]}, …"
    if flag == "--target":
        return (
            "--target: the target is started here; for one that runs, use `outrider gateway "
            "--target` and `outrider draft --target`"
        )
    known = [each.flag for fields in all_fields().values() for each in fields]
    return refusal(flag) or not_a_setting(flag, known)


@functools.cache
def _parser() -> FlagParser:
    """Reads all flags; its help lists each by the name that sets it here."""
    parser = FlagParser("outrider serve", LauncherSettings.__doc__ or "", _EPILOG)
    of_sglang = declared_fields(SglangSettings)
    listed: dict[str, tuple[tuple[str, ...], Field]] = {
        each.flag: ((), each) for each in _OWN if each not in of_sglang
    }
    owned = [
        (owners, each)
        for service, fields in _FIELDS.items()
        for each in fields
        if service in (owners := _owners(each.flag))
    ]
    for owners, each in sorted(owned, key=lambda pair: len(pair[0])):
        listed.setdefault(each.flag, (owners, each))
    listed |= {each.flag: (("SGLang, for its launch lines",), each) for each in of_sglang}
    taken = set(listed)
    for owners, each in listed.values():
        aliases = tuple(alias for alias in each.aliases if alias not in taken)
        parser.add(_sortable(replace(each, aliases=aliases)), title=_title(owners))
        taken.update(aliases)
    for service, fields in _FIELDS.items():
        for each in fields:
            own = _sortable(replace(each, flag=f"--{service}{each.flag[1:]}", aliases=()))
            if own.flag not in taken:
                is_listed = service not in _owners(each.flag)
                parser.add(own, title=_title((service,)), is_listed=is_listed)
    return parser


def _sortable(field: Field) -> Field:
    """Returns a field as the launcher reads it: of the target's names it takes several."""
    return replace(field, is_repeated=field.is_repeated or field.flag in _NAMES)


def _title(owners: Sequence[str]) -> str:
    return f"flags of {' and '.join(owners)}" if owners else ""
