"""Suites that others wrote for servers like this one, against the gateway of `OUTRIDER_URL`.

`python with_suite.py openai|vllm|sglang|llama_cpp`. Their sources come from PyPI, pinned, into
`sources/` of the environment; nothing of them is copied here. What a suite needs of its own server
is put in its place by a plugin, `suites/NAME.py`. The same file says which tests do not apply, and
why: those of another model's words, of another server's own routes, flags and wording.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.clients.suites.suite import Suite

_HERE = Path(__file__).parent


def _source(suite: Suite, folder: Path) -> Path:
    """Returns where the tests are, which are fetched unless they are there."""
    place = folder / suite.requirement
    if not place.exists():
        packed_in = folder / f"{suite.requirement}.packed"
        kind = "--only-binary" if suite.is_wheel else "--no-binary"
        unearth = (sys.executable, "-m", "unearth", kind, "--download", str(packed_in))
        subprocess.run([*unearth, suite.requirement], check=True, capture_output=True)
        (packed,) = packed_in.iterdir()
        if suite.is_wheel:
            with zipfile.ZipFile(packed) as wheel:
                wheel.extractall(place, [each for each in wheel.namelist() if suite.part in each])
        else:
            with tarfile.open(packed) as archive:
                members = [each for each in archive if suite.part in each.name]
                archive.extractall(place, members, filter="data")
        packed.unlink()
    return next(place.glob(suite.root))


def main(name: str) -> int:
    sys.path.insert(0, str(_HERE))
    suite: Suite = importlib.import_module(f"suites.{name}").SUITE
    folder = Path(sys.prefix) / "sources"
    folder.mkdir(exist_ok=True)
    root = _source(suite, folder)
    settings = root / "pytest.ini"
    settings.write_text("[pytest]\n")  # none of the suite's own
    program = (sys.executable, "-m", "pytest", "-q", "-c", str(settings), f"--rootdir={root}")
    options = ("-p", f"suites.{name}", "-p", "no:cacheprovider", "--tb=short", "--timeout=240")
    options += (f"--confcutdir={root / suite.configured}",)
    paths = os.pathsep.join((str(_HERE), str(root)))
    return subprocess.run(
        [*program, *options, *suite.options, *(str(root / each) for each in suite.files)],
        cwd=root,
        env={**os.environ, **suite.variables(), "PYTHONPATH": paths},
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
