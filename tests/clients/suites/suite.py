"""What a suite is, which of its tests apply, and modules in place of those of its own server."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest

URL = os.environ.get("OUTRIDER_URL", "")
"""Of the gateway."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Where its tests are, and which of them say nothing of a gateway.

    Attributes:
        requirement: the package on PyPI, pinned.
        part: what the names of needed files in it hold.
        root: a pattern of where its tests are run.
        files: the tests, below `root`.
        configured: whose conftest.py, and those below, are read.
        not_applicable: pattern of test names to the reason.
    """

    requirement: str
    part: str
    root: str
    files: Sequence[str]
    not_applicable: Mapping[str, str]
    is_wheel: bool = False
    configured: str = "."
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        return {**self.environment, "OPENAI_API_KEY": "none"}


class Selection:
    """A plugin that leaves out what does not apply, and counts it by its reason."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._left_out: Counter[str] = Counter()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        kept, left_out = [], []
        for item in items:
            reason = self._reason(item.nodeid)
            if reason is None:
                kept.append(item)
            else:
                left_out.append(item)
                self._left_out[reason] += 1
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)

    def _reason(self, name: str) -> str | None:
        patterns = self._suite.not_applicable
        return next((patterns[each] for each in patterns if fnmatchcase(name, f"*{each}")), None)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for reason, count in self._left_out.most_common():
            terminalreporter.write_line(f"{count:4d} do not apply: {reason}")


class Standing(types.ModuleType):
    """A module that has every name: exceptions where they are called so, mocks for the rest."""

    __path__: ClassVar[list[str]] = []
    __file__ = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_error = name.endswith(("Error", "Exception"))
        found = type(name, (Exception,), {}) if is_error else MagicMock(name=name)
        setattr(self, name, found)
        return found


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Puts modules in place of a server's own, which are not installed.

    Args:
        packages: all of whose modules stand in.
        filled: what some modules hold, by their name.
        real: modules that are loaded from a file all the same.
    """

    def __init__(
        self,
        packages: Sequence[str],
        filled: Mapping[str, Mapping[str, Any]],
        real: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        self._packages = packages
        self._filled = filled
        self._real = real
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if (file := self._real(name)) is not None:
            return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] in self._packages or name in self._filled:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Standing:
        return Standing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self._filled.get(module.__name__, {}))
