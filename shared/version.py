"""The version of this package, as servers report it."""

from __future__ import annotations

import importlib.metadata

# A local version label (PEP 440), for a checkout that is not installed and so has no metadata.
NOT_INSTALLED = "0+checkout"


def package_version() -> str:
    """Returns the installed version, or `NOT_INSTALLED`."""
    try:
        return importlib.metadata.version("outrider")
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED
