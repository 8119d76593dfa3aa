from __future__ import annotations

import importlib.metadata

import pytest

from shared.version import NOT_INSTALLED, package_version


def test_installed() -> None:
    assert package_version() == importlib.metadata.version("outrider") != NOT_INSTALLED


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert package_version() == NOT_INSTALLED
