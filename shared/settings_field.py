"""One setting: its type, its limits, and its conversion from and to text."""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_KEY = "setting"
REQUIRED = dataclasses.MISSING
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def setting(
    default: Any,
    help: str,  # noqa: A002 - the word argparse uses
    *,
    flag: str = "",
    aliases: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    synonyms: Mapping[str, str] | None = None,
    is_secret: bool = False,
    is_shared: bool = False,
    is_model: bool = False,
) -> Any:
    """Declares a field of a settings dataclass.

    The annotation gives the type: str, int, float, bool, Path, an Enum (by value), any of them
    `| None`, or `tuple[type, ...]` for a flag that repeats or takes several values, by comma or
    space.

    Args:
        default: value when nothing is given; `REQUIRED` makes the setting required.
        help: one line for `--help`.
        flag: name on the command line; the field's name with dashes when not given.
        aliases: other names on the command line, without dashes in front.
        minimum, maximum: inclusive limits of a number.
        choices: the only texts that are accepted, in any case.
        synonyms: values by their other spellings.
        is_secret: never shown.
        is_shared: `OUTRIDER_<NAME>` sets it for every service.
        is_model: a path that may be a model of the Hugging Face Hub, see `shared.hub`.
    """
    field = Field(
        flag=flag,
        default=default,
        help=help,
        minimum=minimum,
        maximum=maximum,
        choices=tuple(choices),
        is_secret=is_secret,
        is_shared=is_shared,
        aliases=tuple(f"--{alias}" for alias in aliases),
        synonyms=synonyms or {},
        is_model=is_model,
    )
    return dataclasses.field(default=default, metadata={_KEY: field})


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A declared setting, which parses texts. `setting` leaves the name, the type and a default
    flag to `declared_fields`.

    Attributes:
        kind: type of one value, without `| None` and `tuple`.
    """

    flag: str
    default: Any
    help: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]
    is_secret: bool
    is_shared: bool
    aliases: tuple[str, ...]
    synonyms: Mapping[str, str]
    is_model: bool
    name: str = ""
    kind: type = str
    is_repeated: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Its spellings on the command line."""
        return (self.flag, *self.aliases)

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED

    @property
    def variable(self) -> str:
        """Last part of the names of its environment variables."""
        return self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    def parse(self, texts: Sequence[str]) -> Any:
        """Returns the value of the last text, or the tuple of all for a repeated setting.

        Raises:
            ValueError: its message says what the text must be.
        """
        if not self.is_repeated:
            return self._parse_one(texts[-1].strip())
        parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
        return tuple(self._parse_one(part) for part in parts or [""])

    def render(self, value: Any) -> str:
        """Returns the text that `parse` reads back; an absent value is empty."""
        if value is None or value is REQUIRED:
            return ""
        if isinstance(value, tuple):
            return ",".join(self.render(item) for item in value)
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value.value if isinstance(value, enum.Enum) else value)

    @property
    def expectation(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is bool:
            return "true or false"
        noun = {int: "a whole number", float: "a number"}.get(self.kind, "not empty")
        return noun + self._limits

    @property
    def full_help(self) -> str:
        """Meaning, limits and default, for `--help`."""
        limits = "" if self.is_switch or self.expectation == "not empty" else self.expectation
        default = "required" if self.is_required else self.render(self.default) or "none"
        default = "(secret)" if self.is_secret else default
        return f"{self.help}{limits and f' ({limits})'} (default: {default})"

    @property
    def _limits(self) -> str:
        if self.minimum is not None and self.maximum is not None:
            return f" in [{self.minimum:g}, {self.maximum:g}]"
        if self.minimum is not None:
            return f", at least {self.minimum:g}"
        return "" if self.maximum is None else f", at most {self.maximum:g}"

    def _parse_one(self, text: str) -> Any:
        text = self.synonyms.get(text.lower(), text)
        if self.choices:
            text = self._choice(text)
        if self.kind is bool:
            if text.lower() not in _TRUE + _FALSE:
                raise ValueError(self.expectation)
            return text.lower() in _TRUE
        try:
            value = self.kind(text)
        except ValueError:
            raise ValueError(self.expectation) from None
        is_number = isinstance(value, (int, float))
        if not text or (is_number and not self._is_within(value)):
            raise ValueError(self.expectation)
        return value

    def _choice(self, text: str) -> str:
        for choice in self.choices:
            if choice.lower() == text.lower():
                return choice
        raise ValueError(self.expectation)

    def _is_within(self, value: float) -> bool:
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        return math.isfinite(value) and low <= value <= high


def declared_fields(cls: type) -> tuple[Field, ...]:
    """Returns the settings of a dataclass in order of declaration."""
    annotations = typing.get_type_hints(cls)
    return tuple(_field(field, annotations[field.name]) for field in dataclasses.fields(cls))


def _field(field: dataclasses.Field[Any], annotation: Any) -> Field:
    declared: Field = field.metadata[_KEY]
    kind, is_repeated = _kind(annotation)
    values = tuple(str(member.value) for member in kind) if issubclass(kind, enum.Enum) else ()
    return dataclasses.replace(
        declared,
        name=field.name,
        flag="--" + (declared.flag or field.name.replace("_", "-")),
        kind=kind,
        is_repeated=is_repeated,
        choices=declared.choices or values,
    )


def _kind(annotation: Any) -> tuple[type, bool]:
    """Returns an annotation's type without `| None` and `tuple[…, ...]`, and whether it is a
    tuple."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (a for a in typing.get_args(annotation) if a is not types.NoneType)
    is_repeated = typing.get_origin(annotation) is tuple
    if is_repeated:
        annotation, _ = typing.get_args(annotation)
    assert annotation in (str, int, float, bool, Path) or issubclass(annotation, enum.Enum), (
        f"a setting cannot be {annotation}"
    )
    return annotation, is_repeated
