"""Flags of a command line, without yet knowing whether they mean anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Arguments:
    """What stood on the command line.

    Attributes:
        flags: values of each flag in order; none for a flag that lacks its value.
        strays: words that belong to no flag.
    """

    flags: dict[str, list[str]] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)


def scan(argv: Sequence[str], switches: frozenset[str]) -> Arguments:
    """Splits `--name value`, `--name=value`, `--switch` and `--no-switch`.

    Unlike argparse it never stops at the first problem.

    Args:
        switches: flags that take no value; `--no-` before the name turns one off.
    """
    arguments = Arguments()
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, has_value, value = word.partition("=")
        if not word.startswith("--"):
            arguments.strays.append(word)
        elif has_value:
            arguments.flags.setdefault(flag, []).append(value)
        elif (positive := _positive(flag)) in switches:
            arguments.flags.setdefault(positive, []).append("true" if flag == positive else "false")
        else:
            values = arguments.flags.setdefault(flag, [])
            if words and not words[0].startswith("--"):
                values.append(words.pop(0))
    return arguments


def _positive(flag: str) -> str:
    return f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else flag
