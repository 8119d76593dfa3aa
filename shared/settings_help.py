"""The `--help` of a process."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from shared.settings_field import Field


def help_text(
    cls: type, groups: Mapping[str, Sequence[Field]], *, program: str, epilog: str
) -> str:
    """Returns every flag with its meaning, limits and default.

    Args:
        cls: its docstring says what the program is.
        groups: flags by the title above them; an empty title is the program's own.
    """
    head = argparse.ArgumentParser(
        prog=program,
        description=(cls.__doc__ or "").partition("\n")[0],
        usage="%(prog)s [--flag value ...]",
        epilog=None if len(groups) > 1 else epilog,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parts: list[str] = []
    for title, fields in groups.items():
        parser = head
        if title:
            parser = argparse.ArgumentParser(
                usage=argparse.SUPPRESS,
                add_help=False,
                formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            )
        group = parser.add_argument_group(f"flags of the {title}") if title else parser
        for field in fields:
            _add(group, field)
        parts.append(parser.format_help().strip())
    return "\n\n".join([*parts, epilog] if len(groups) > 1 else parts)


def _add(parser: argparse._ActionsContainer, field: Field) -> None:
    text = field.help.replace("%", "%%")
    if not field.is_switch:
        text = f"{text} ({field.expectation})" if field.expectation != "not empty" else text
    default = "(required)" if field.is_required else field.render(field.default) or "none"
    if field.is_secret:
        default = "(secret)"
    names = (field.flag, *field.aliases)
    if field.is_switch:
        parser.add_argument(
            *names, action=argparse.BooleanOptionalAction, default=default, help=text
        )
    else:
        metavar = "TEXT" if field.choices else field.kind.__name__.upper()
        action = "append" if field.is_repeated else "store"
        parser.add_argument(*names, metavar=metavar, action=action, default=default, help=text)
