"""Settings of a process: defaults, then environment, then flags, into one frozen dataclass.

    @dataclass(frozen=True, slots=True)
    class DraftSettings:
        port: int = setting(50061, "port of DraftService", minimum=0, maximum=65535)

    settings = load_settings(DraftSettings, service="draft", arguments=sys.argv[1:], env=os.environ)

The field `max_running_requests` is the flag `--max-running-requests` and the variable
`OUTRIDER_DRAFT_MAX_RUNNING_REQUESTS`. A tuple field is a flag that may be repeated and a variable
with commas. Every bad setting is reported, not only the first.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shared.errors import SettingsError

ENV_PREFIX = "OUTRIDER"
S = TypeVar("S")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """What is known of a setting beside its type and default.

    Attributes:
        flag: name of the flag when it is not the field's.
        minimum: smallest allowed number.
        maximum: greatest allowed number.
        is_secret: its value is never shown.
    """

    help: str
    flag: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    is_secret: bool = False


def setting(
    default: Any,
    help: str,  # noqa: A002
    *,
    flag: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    is_secret: bool = False,
) -> Any:
    """Declares a field of a settings dataclass; see `SettingSpec`."""
    spec = SettingSpec(help, flag, minimum, maximum, is_secret)
    return field(default=default, metadata={"setting": spec})


def load_settings(
    cls: type[S], *, service: str, arguments: Sequence[str], env: Mapping[str, str]
) -> S:
    """Reads the settings of one process; `--help` prints them and exits.

    Raises:
        SettingsError: one line for each unknown flag, unknown variable of this service, value of
            the wrong type and value out of its limits.
    """
    hints = typing.get_type_hints(cls)
    settings = [_Setting.of(each, hints) for each in _fields(cls)]
    problems: list[str] = []
    values: dict[str, Any] = {}
    given_flags = _read_flags(settings, service, arguments, problems)
    given_env = _read_env(settings, service, env, problems)
    for each in settings:
        for source, raw in (given_env | given_flags).get(each.name, {}).items():
            try:
                values[each.name] = each.parse(raw)
            except ValueError as error:
                problems.append(f"{source}: {error}")
    if not problems:
        try:
            return cls(**values)
        except SettingsError as error:
            problems.extend(error.problems)
    raise SettingsError(tuple(problems))


def shown_settings(settings: Any) -> dict[str, str]:
    """Returns every setting by flag name as text; secrets are left out."""
    shown: dict[str, str] = {}
    for each in _fields(type(settings)):
        spec = _spec(each)
        if not spec.is_secret:
            shown[_flag(each)] = _text(getattr(settings, each.name))
    return shown


@dataclass(frozen=True, slots=True)
class _Setting:
    """One field with its parser."""

    name: str
    flag: str
    type: Any
    is_list: bool
    default: Any
    spec: SettingSpec

    @classmethod
    def of(cls, each: dataclasses.Field[Any], hints: Mapping[str, Any]) -> _Setting:
        hint = hints[each.name]
        is_list = typing.get_origin(hint) is tuple
        inner = typing.get_args(hint)[0] if is_list else _without_none(hint)
        return cls(each.name, _flag(each), inner, is_list, each.default, _spec(each))

    def parse(self, raw: Sequence[str]) -> Any:
        parsed = [self._parse_one(text) for text in raw]
        return tuple(parsed) if self.is_list else parsed[-1]

    def _parse_one(self, text: str) -> Any:
        if self.type is bool:
            return _parse_bool(text)
        if isinstance(self.type, type) and issubclass(self.type, enum.Enum):
            return _parse_choice(self.type, text)
        if self.type in (int, float):
            return self._parse_number(text)
        return self.type(text)

    def _parse_number(self, text: str) -> int | float:
        try:
            number: int | float = self.type(text)
        except ValueError:
            kind = "a whole number" if self.type is int else "a number"
            raise ValueError(f"{text!r} is not {kind}") from None
        low, high = self.spec.minimum, self.spec.maximum
        if number != number or (low is not None and number < low):
            raise ValueError(f"{text} is below the smallest allowed, {low:g}")
        if high is not None and number > high:
            raise ValueError(f"{text} is above the greatest allowed, {high:g}")
        return number


_Given = dict[str, dict[str, Sequence[str]]]


def _read_flags(
    settings: Sequence[_Setting], service: str, arguments: Sequence[str], problems: list[str]
) -> _Given:
    parser = _Parser(prog=f"outrider-{service}", allow_abbrev=False, problems=problems)
    for each in settings:
        # A bare `--flag` switches a bool on; `--flag=false` switches it off.
        options: dict[str, Any] = {"nargs": "?", "const": "true"} if each.type is bool else {}
        default = _text(each.default) or "unset"
        parser.add_argument(
            f"--{each.flag}",
            dest=each.name,
            action="append",
            help=f"{each.spec.help} (default: {default})".replace("%", "%%"),
            metavar=_metavar(each),
            **options,
        )
    known, unknown = parser.parse_known_args(arguments)
    problems.extend(f"{text}: no such setting" for text in unknown)
    flags = {each.name: each.flag for each in settings}
    return {name: {f"--{flags[name]}": raw} for name, raw in vars(known).items() if raw is not None}


def _read_env(
    settings: Sequence[_Setting], service: str, env: Mapping[str, str], problems: list[str]
) -> _Given:
    prefix = f"{ENV_PREFIX}_{service.upper()}_"
    names = {prefix + each.flag.upper().replace("-", "_"): each for each in settings}
    given: _Given = {}
    for variable, text in env.items():
        if not variable.startswith(prefix):
            continue
        each = names.get(variable)
        if each is None:
            problems.append(f"{variable}: no such setting")
        else:
            given[each.name] = {variable: text.split(",") if each.is_list else [text]}
    return given


class _Parser(argparse.ArgumentParser):
    """Collects problems instead of exiting at the first."""

    def __init__(self, *, problems: list[str], **options: Any) -> None:
        super().__init__(**options)
        self._problems = problems

    def error(self, message: str) -> typing.NoReturn:
        self._problems.append(message)
        raise SettingsError(tuple(self._problems))


def _fields(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return tuple(each for each in dataclasses.fields(cls) if "setting" in each.metadata)


def _spec(each: dataclasses.Field[Any]) -> SettingSpec:
    spec = each.metadata["setting"]
    assert isinstance(spec, SettingSpec)
    return spec


def _flag(each: dataclasses.Field[Any]) -> str:
    return _spec(each).flag or each.name.replace("_", "-")


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        [inner] = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        return inner
    return hint


def _metavar(each: _Setting) -> str:
    if isinstance(each.type, type) and issubclass(each.type, enum.Enum):
        return "{" + ",".join(str(member.value) for member in each.type) + "}"
    return str(each.type.__name__).upper()


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _parse_choice(choices: type[enum.Enum], text: str) -> enum.Enum:
    for member in choices:
        if str(member.value).lower() == text.lower():
            return member
    allowed = ", ".join(str(member.value) for member in choices)
    raise ValueError(f"{text!r} is not one of {allowed}")


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)
