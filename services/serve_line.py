"""Which service each flag of `outrider serve` belongs to.

A flag of one service goes there. Of those that several services have, SGLang's meaning decides:
`--host` and `--port` are those of HTTP, `--dtype` holds for target and draft. `--target-X`,
`--draft-X` and `--gateway-X` set flag X of that service alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gateway.settings import GatewaySettings
from services.draft.settings import DraftSettings
from services.serve_settings import LauncherSettings
from services.sglang_settings import is_only_one, refusal, without_prefix
from services.target.settings import TargetSettings
from shared.settings_argv import Syntax, scan
from shared.settings_field import Field, declared_fields

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
    """Sorts the flags of a launch line by where they belong."""
    line = Line()
    scanned = scan(without_prefix(arguments), _syntax())
    line.problems.extend(f"unexpected argument {text!r}" for text in scanned.strays)
    for flag, texts in scanned.flags.items():
        _sort(flag, texts, line)
    return line


def all_fields() -> Mapping[str, tuple[Field, ...]]:
    """Returns every flag by where it belongs, the launcher's own under an empty name."""
    return {"": _OWN, **_FIELDS}


def _sort(flag: str, texts: Sequence[str], line: Line) -> None:
    own = {each.flag: each for each in _OWN}.get(flag)
    if own is not None:
        line.own.extend(_words(flag, _split(texts) if own.is_repeated else texts))
        return
    owners = _owners(flag)
    for service in owners:
        name = _OTHER_NAMES.get((service, flag), flag)
        line.services[service].extend(_words(name, texts))
    if owners or is_only_one(flag, texts):
        return
    service, _, rest = flag.removeprefix("--").partition("-")
    if service in _FIELDS and f"--{rest}" in {each.flag for each in _FIELDS[service]}:
        line.services[service].extend(_words(f"--{rest}", texts))
    else:
        line.problems.append(_problem(flag))


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
    close = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
    hint = f"; did you mean {close[0]}?" if close else ""
    return refusal(flag) or f"{flag} is not a setting{hint}"


def _split(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _words(flag: str, texts: Sequence[str]) -> list[str]:
    return [f"{flag}={text}" for text in texts] or [flag]


def _syntax() -> Syntax:
    """The syntax of all flags; where an alias of one is the name of another, the name counts."""
    plain = [each for fields in all_fields().values() for each in fields]
    switches = {each.flag for each in plain if each.is_switch}
    lists = {each.flag for each in plain if each.is_repeated}
    for service, fields in _FIELDS.items():
        switches |= {f"--{service}{each.flag[1:]}" for each in fields if each.is_switch}
        lists |= {f"--{service}{each.flag[1:]}" for each in fields if each.is_repeated}
    names = {each.flag for each in plain}
    aliases = {
        alias: each.flag for each in reversed(plain) for alias in each.aliases if alias not in names
    }
    return Syntax(frozenset(switches), frozenset(lists), aliases)
