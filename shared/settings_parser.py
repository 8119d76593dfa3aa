"""The texts of flags: from a command line, the environment and `--config FILE.yaml`.

ConfigArgParse reads all three. Values are checked elsewhere, so that all problems are reported at
once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

from configargparse import ArgumentParser, YAMLConfigFileParser

from shared.errors import SettingsError
from shared.settings_field import Field

_CONFIG = "--config"


@dataclass(frozen=True, slots=True)
class Given:
    """The words of a command line, by flag.

    Attributes:
        flags: texts of each declared flag by its first name; empty for a flag without a value.
        typed: the name under which a declared flag was typed.
        unknown: texts of each flag that is not declared.
        strays: words that belong to no flag.
    """

    flags: dict[str, list[str]] = field(default_factory=dict)
    typed: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, list[str]] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)


class FlagParser:
    """Reads the flags that are added to it; `--help` prints them and exits."""

    def __init__(self, program: str, description: str = "", epilog: str = "") -> None:
        self._parser = ArgumentParser(
            prog=program,
            description=description,
            epilog=epilog,
            usage="%(prog)s [--flag value ...]",
            allow_abbrev=False,
            add_config_file_help=False,
            add_env_var_help=False,
            config_file_parser_class=_FlagsFile,
            formatter_class=_HelpFormatter,
        )
        self._parser.error = _raise
        self._flags: dict[str, str] = {}
        self._parser.add_argument(
            _CONFIG, is_config_file=True, metavar="FILE", help="YAML file of flags by name"
        )

    def add(
        self, field: Field, *, variable: str | None = None, title: str = "", is_listed: bool = True
    ) -> None:
        """Adds a flag.

        Args:
            variable: environment variable that also sets the flag.
            title: heading of the flag's group in `--help`.
            is_listed: whether `--help` shows the flag.
        """
        parser = self._parser
        if title:
            groups = {group.title: group for group in self._parser._action_groups}
            parser = groups.get(title) or self._parser.add_argument_group(title)
        self._flags |= dict.fromkeys(field.names, field.flag)
        options: dict[str, Any] = {"dest": field.flag, "default": argparse.SUPPRESS}
        text = field.full_help.replace("%", "%%") if is_listed else argparse.SUPPRESS
        parser.add_argument(
            *field.names,
            **options,
            action="extend" if field.is_repeated else "store",
            nargs="*" if field.is_repeated else "?",
            const="true" if field.is_switch else None,
            metavar="TEXT" if field.choices else field.kind.__name__.upper(),
            help=text,
            env_var=variable,
        )
        if field.is_switch:
            is_listed = is_listed and field.default is not False
            parser.add_argument(
                *(f"--no-{name.removeprefix('--')}" for name in field.names),
                **options,
                action="store_const",
                const="false",
                help="" if is_listed else argparse.SUPPRESS,
            )

    def read(self, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> Given:
        """Returns the given flags. A flag beats the file, which beats the environment.

        Raises:
            SettingsError: the file cannot be read, or holds something other than flags.
        """
        parsed, rest = self._parser.parse_known_args(list(arguments), env_vars=env or {})
        texts = {flag: value for flag, value in vars(parsed).items() if flag.startswith("--")}
        given = Given({flag: _texts(value) for flag, value in texts.items()})
        names = [word.partition("=")[0] for word in arguments]
        given.typed.update({self._flags[name]: name for name in names if name in self._flags})
        flag = None
        for word in rest:
            if word.startswith("--"):
                flag, has_value, value = word.partition("=")
                given.unknown.setdefault(flag, []).extend([value] if has_value else [])
                flag = None if has_value else flag
            elif flag is None:
                given.strays.append(word)
            else:
                given.unknown[flag].append(word)
                flag = None
        return given

    def help(self) -> str:
        """Returns what `--help` prints."""
        return str(self._parser.format_help())


def _texts(value: object) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [str(value)]


def _raise(message: str) -> NoReturn:
    raise SettingsError((message,))


class _HelpFormatter(argparse.HelpFormatter):
    """Shows that a flag needs a value, although the parser accepts it without one."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        is_switch = action.const == "true"
        return super()._format_args(action, default_metavar) if is_switch else str(action.metavar)


class _FlagsFile(YAMLConfigFileParser):  # type: ignore[misc]
    """A YAML file of flags; a nested mapping has the flags of one service.

    model-path: meta-llama/Llama-3.1-8B-Instruct
    speculative_algorithm: EAGLE3
    cuda-graph-bs: [1, 2, 4]
    trust-remote-code: true
    draft: {device: "cuda:1"}        # --draft-device cuda:1
    """

    def parse(self, stream: IO[str]) -> dict[str, str]:
        """Raises:
        SettingsError: it is not a mapping of flags to values.
        """
        import yaml  # few processes read a file

        try:
            content = yaml.safe_load(stream) or {}
        except yaml.YAMLError as error:
            _raise(f"{_CONFIG} is {stream.name}, which is not YAML: {error}")
        if not isinstance(content, dict):
            _raise(f"{_CONFIG} is {stream.name}; it must hold one mapping of flags to values")
        return dict(_flags(content, "", stream.name))


def _flags(content: Mapping[str, object], prefix: str, path: str) -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        flag = prefix + str(name).removeprefix("--").replace("_", "-")
        if isinstance(value, dict):
            yield from _flags(value, f"{flag}-", path)
            continue
        values = value if isinstance(value, list) else [value]
        for item in values:
            if isinstance(item, dict | list):
                _raise(f"{path}: {flag} holds {item!r}; it must be a value")
        if value is not None:
            yield flag, ",".join(map(str, values))
