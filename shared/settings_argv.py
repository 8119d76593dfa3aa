"""Flags of a command line, without yet knowing whether they mean anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.settings_field import Field


@dataclass(frozen=True, slots=True)
class Syntax:
    """The spelling of flags.

    Attributes:
        switches: flags that take no value; `--no-` before the name turns one off.
        lists: flags that take every word up to the next flag.
        aliases: other spellings, each with the flag that it stands for.
    """

    switches: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, fields: Sequence[Field]) -> Syntax:
        """Returns the syntax of declared settings."""
        return cls(
            switches=frozenset(each.flag for each in fields if each.is_switch),
            lists=frozenset(each.flag for each in fields if each.is_repeated),
            aliases={alias: each.flag for each in fields for alias in each.aliases},
        )


@dataclass(frozen=True, slots=True)
class Arguments:
    """The parsed command line.

    Attributes:
        flags: values of each flag in order, under its own name; none for a flag that lacks its
            value.
        strays: words that belong to no flag.
    """

    flags: dict[str, list[str]] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)


def scan(argv: Sequence[str], syntax: Syntax) -> Arguments:
    """Splits `--name value`, `--name=value`, `--switch` and `--no-switch`.

    Unlike argparse it never stops at the first problem.
    """
    arguments = Arguments()
    words = list(argv)
    while words:
        word = words.pop(0)
        spelling, has_value, value = word.partition("=")
        flag = syntax.aliases.get(spelling, spelling)
        if not word.startswith("--"):
            arguments.strays.append(word)
        elif has_value:
            arguments.flags.setdefault(flag, []).append(value)
        elif (positive := _positive(flag, syntax)) in syntax.switches:
            arguments.flags.setdefault(positive, []).append("true" if flag == positive else "false")
        else:
            values = arguments.flags.setdefault(flag, [])
            most = len(words) if flag in syntax.lists else 1
            while most and words and not words[0].startswith("--"):
                values.append(words.pop(0))
                most -= 1
    return arguments


def _positive(flag: str, syntax: Syntax) -> str:
    positive = f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else flag
    return syntax.aliases.get(positive, positive)
