"""Flags from a YAML file: `--config FILE`.

    model-path: meta-llama/Llama-3.1-8B-Instruct
    speculative_algorithm: EAGLE3
    cuda-graph-bs: [1, 2, 4]
    trust-remote-code: true
    draft: {device: "cuda:1"}        # --draft-device cuda:1

A flag of the command line beats the file, which beats the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.errors import SettingsError

_FLAG = "--config"


def with_config_file(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with the flags of `--config FILE`, if given, in front.

    Raises:
        SettingsError: the file cannot be read or holds something other than flags.
    """
    rest, paths = list[str](), list[str]()
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == _FLAG:
            if not words:
                raise SettingsError((f"{_FLAG} needs a value: a YAML file",))
            paths.append(words.pop(0))
        elif word.startswith(f"{_FLAG}="):
            paths.append(word.partition("=")[2])
        else:
            rest.append(word)
    given = {word.partition("=")[0] for word in rest if word.startswith("--")}
    read = [word for path in paths for word in _words(Path(path))]
    return [word for word in read if word.partition("=")[0] not in given] + rest


def _words(path: Path) -> list[str]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(
            (f"{_FLAG} is {path}, which cannot be read: {error.strerror}",)
        ) from None
    except yaml.YAMLError as error:
        raise SettingsError((f"{_FLAG} is {path}, which is not YAML: {error}",)) from None
    if not isinstance(content or {}, dict):
        raise SettingsError((f"{_FLAG} is {path}; it must hold one mapping of flags to values",))
    return _flags(content or {}, "--", path)


def _flags(content: Mapping[str, object], prefix: str, path: Path) -> list[str]:
    words: list[str] = []
    for name, value in content.items():
        flag = prefix + str(name).removeprefix("--").replace("_", "-")
        if isinstance(value, dict):
            words += _flags(value, f"{flag}-", path)
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict | list):
                raise SettingsError((f"{path}: {flag[2:]} holds {each!r}; it must be a value",))
            if each is not None:
                words.append(f"{flag}={_text(each)}")
    return words


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
