"""Typed reading of a model folder's JSON objects; errors name the file and the key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from shared.errors import CheckpointError
from shared.model_files import read_json

CONFIG_FILE = "config.json"

_T = TypeVar("_T", int, float, bool, str)


class ConfigFile:
    """One JSON object, or an object nested in it. A key set to null counts as absent."""

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Raises: CheckpointError if the file is missing or holds no JSON object."""
        return cls(path, read_json(path))

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def is_null(self, key: str) -> bool:
        """Whether the key is there and set to null."""
        return key in self.values and self.values[key] is None

    def integer(self, key: str, default: int | None = None) -> int:
        return self._typed(key, int, default)

    def number(self, key: str, default: float | None = None) -> float:
        if isinstance(self.values.get(key), int):
            return float(self._typed(key, int, None))
        return self._typed(key, float, default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._typed(key, bool, default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, str, default)

    def texts(self, key: str) -> tuple[str, ...]:
        """Returns a list of strings; empty when absent."""
        return self._list(key, str)

    def integers(self, key: str) -> tuple[int, ...]:
        """Returns one integer or a list of them; empty when absent."""
        if isinstance(self.values.get(key), int):
            return (self.integer(key),)
        return self._list(key, int)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Returns one number or a list of them, null as 0; empty when absent."""
        value = self.values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (float(value),)
        if isinstance(value, list):
            value = [item or 0.0 for item in value]
        if isinstance(value, list) and all(type(item) in (int, float) for item in value):
            return tuple(float(item) for item in value)
        return self._list(key, float)

    def with_defaults(self, defaults: Mapping[str, object]) -> ConfigFile:
        """Returns the same object with `defaults` for keys that are absent."""
        return ConfigFile(self.path, {**defaults, **self.values})

    def with_values(self, values: Mapping[str, object]) -> ConfigFile:
        """Returns the same object with `values` replacing or adding keys."""
        return ConfigFile(self.path, {**self.values, **values})

    def nested(self, key: str) -> ConfigFile:
        """Returns the object under `key`; an empty one when absent."""
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}: {key} is {value!r}; it must be an object")
        return ConfigFile(self.path, value)

    def _typed(self, key: str, kind: type[_T], default: _T | None) -> _T:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.path} has no {key}")
            return default
        if type(value) is not kind:
            raise CheckpointError(
                f"{self.path}: {key} is {value!r}; it must be of type {kind.__name__}"
            )
        return value

    def _list(self, key: str, kind: type[_T]) -> tuple[_T, ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise CheckpointError(
                f"{self.path}: {key} is {value!r}; it must be a list of {kind.__name__}"
            )
        return tuple(value)
