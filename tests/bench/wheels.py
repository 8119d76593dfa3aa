"""Downloads what a host without a package index lacks to serve over HTTP and to run the tests.

    python -m tests.bench.wheels --out .whl [--python 3.12] [--without NAME …]

The host has torch and transformers. The names follow from the requirements of the project as it is
installed here, their versions from `constraints.txt`, so the folder holds one version of each.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# Of the extras, what the target and the tests need beside torch and transformers.
EXTRA_ROOTS = ("llguidance", "orjson", "pytest-asyncio", "pytest-timeout")
# What comes with torch and transformers, and pytest, which most hosts have.
PRESENT = frozenset(
    (
        "huggingface-hub",
        "numpy",
        "packaging",
        "pytest",
        "safetensors",
        "tokenizers",
        "torch",
        "tqdm",
        "transformers",
    )
)
# pip takes a platform literally: each glibc that wheels are built for has a name of its own.
PLATFORMS = (
    *(f"manylinux_2_{minor}" for minor in (39, 34, 31, 28, 27, 24, 17, 12, 5)),
    *("manylinux2014", "manylinux2010", "manylinux1"),
)


class NotPinned(Exception):
    """A package that is needed has no version in the constraints."""


def needed_names(roots: Iterable[str], have: frozenset[str], python: str) -> list[str]:
    """Returns the roots and all that they require, but for what the host has; sorted.

    Args:
        python: version of the host's Python, as `3.12`.
    """
    found: set[str] = set()
    waiting: list[str] = [canonicalize_name(root) for root in roots]
    while waiting:
        name = waiting.pop()
        if name in have or name in found:
            continue
        found.add(name)
        waiting += _requirements(name, python)
    return sorted(found)


def _requirements(name: str, python: str) -> list[str]:
    environment = {"extra": "", "python_version": python, "python_full_version": f"{python}.0"}
    try:
        parsed = map(Requirement, requires(name) or ())
    except PackageNotFoundError:
        return []  # another platform's or another Python's; its version is pinned or refused
    return [
        canonicalize_name(each.name)
        for each in parsed
        if each.marker is None or each.marker.evaluate(environment)
    ]


def read_pins(constraints: str) -> dict[str, str]:
    """Returns the line of each pinned package, by canonical name."""
    lines = (line.strip() for line in constraints.splitlines())
    return {
        canonicalize_name(line.partition("==")[0]): line for line in lines if re.match(r"\w", line)
    }


def pinned(names: Iterable[str], pins: Mapping[str, str]) -> list[str]:
    """Returns `NAME==VERSION` of each name.

    Raises:
        NotPinned: names those that the constraints leave out.
    """
    missing = [name for name in names if name not in pins]
    if missing:
        raise NotPinned(f"constraints.txt has no version of {', '.join(missing)}")
    return [pins[name] for name in names]


def project_roots() -> list[str]:
    """Returns what the gateway and every service require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["gateway"]]
    return [Requirement(line).name for line in lines] + list(EXTRA_ROOTS)


def download(requirements: list[str], out: Path, python: str, machine: str) -> None:
    """Fetches one wheel for each requirement.

    Raises:
        CalledProcessError: there is no wheel of one; pip has said of which.
    """
    platforms = [f"--platform={each}_{machine}" for each in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--implementation=cp"]
    command += [f"--python-version={python}", *platforms, f"--dest={out}", *requirements]
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="wheels", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".whl"))
    parser.add_argument("--python", default="3.12", help="version of the host's Python")
    parser.add_argument("--machine", default="x86_64")
    parser.add_argument("--without", nargs="*", default=[], help="names that the host has")
    flags = parser.parse_args()
    have = PRESENT | frozenset(map(canonicalize_name, flags.without))
    names = needed_names(project_roots(), have, flags.python)
    pins = read_pins((ROOT / "constraints.txt").read_text())
    try:
        requirements = pinned(names, pins)
    except NotPinned as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    flags.out.mkdir(parents=True, exist_ok=True)
    for old in flags.out.glob("*.whl"):  # two versions of one stop the installation
        old.unlink()
    download(requirements, flags.out, flags.python, flags.machine)
    size_mb = sum(each.stat().st_size for each in flags.out.glob("*.whl")) / 1e6
    print(f"{len(requirements)} wheels, {size_mb:.1f} MB, in {flags.out}: {' '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
