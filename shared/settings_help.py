"""The `--help` of a process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shared.settings_field import Field


def help_text(cls: type, fields: Sequence[Field], *, env_prefix: str, program: str) -> str:
    """Returns every flag with its meaning, limits, environment variable and default."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=(cls.__doc__ or "").partition("\n")[0],
        epilog=f"Each flag has a variable: {fields[0].flag} is {env_prefix}{fields[0].variable}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in fields:
        _add(parser, field)
    return parser.format_help().rstrip()


def _add(parser: argparse.ArgumentParser, field: Field) -> None:
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
