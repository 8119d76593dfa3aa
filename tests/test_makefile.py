"""Set-up and `make serve`, as far as they go without installing anything."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _make(*words: str, at: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # As a user's shell would, also where these tests run below `make test`.
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(
        ["make", *words], cwd=at, env=env, capture_output=True, text=True, check=False
    )


def _program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that set-up reads, without anything installed."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("folder", ["/models/with space", "/models/it's", "/plain"])
def test_folders_of_any_name_reach_the_launcher(folder: str) -> None:
    result = _make("-n", "serve", "PY=python", f"MODEL={folder}", "DTYPE=bf16")
    [line] = [each for each in result.stdout.splitlines() if "services.cli" in each]
    words = shlex.split(line.removeprefix("@"))
    assert words[words.index("--model") + 1] == folder
    assert words[words.index("--dtype") + 1] == "bf16"


def test_an_old_python_is_refused_by_name_before_anything_is_made(checkout: Path) -> None:
    old = _program(
        checkout / "old", 'case "$1" in --version) echo Python 3.10.1;; *) exit 1;; esac'
    )
    result = _make("setup", f"PYTHON={old}", at=checkout)
    assert result.returncode != 0
    assert "Outrider needs Python 3.11 or newer" in result.stderr
    assert "Python 3.10.1" in result.stderr
    assert "PYTHON=python3.11" in result.stderr
    assert not (checkout / ".venv").exists()


def test_a_venv_of_an_old_python_is_made_anew(checkout: Path) -> None:
    _program(checkout / ".venv" / "bin" / "python", "exit 1")
    new = _program(
        checkout / "new",
        """case "$1" in
          --version) echo Python 3.12.0;;
          -m) mkdir -p .venv/bin; printf '#!/bin/sh\\necho Collecting torch' > .venv/bin/python
              chmod +x .venv/bin/python;;
        esac""",
    )
    result = _make("setup", f"PYTHON={new}", at=checkout)
    assert result.returncode == 0, result.stderr
    said = result.stdout.splitlines()
    assert said[0] == "set-up: a new .venv of Python 3.12.0"
    assert said[1].startswith("set-up: installing into .venv")
    assert "Collecting torch" in said
    assert (checkout / ".venv" / ".installed").exists()


@pytest.mark.parametrize("failing", ["", "setup", "check", "test", "test-kernels", "fuzz"])
def test_ci_passes_when_all_its_parts_do(failing: str, tmp_path: Path) -> None:
    """With a `make` that notes its target, and fails for one."""
    noted = tmp_path / "noted"
    _program(
        tmp_path / "bin" / "make", f'echo "$1" >> {noted}; echo "ran $1"; [ "$1" != "{failing}" ]'
    )
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    result = subprocess.run(
        [ROOT / ".ci" / "run"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode == 0) == (failing == "")
    if failing == "":
        ran = {"setup", "check", "test", "test-kernels", "fuzz"}
        assert set(noted.read_text().split()) == ran
        assert ran <= {line.removeprefix("ran ") for line in result.stdout.splitlines()}
        assert "ci: everything passed" in result.stdout
    else:
        assert "everything passed" not in result.stdout


def test_ci_that_is_stopped_leaves_nothing_running(tmp_path: Path) -> None:
    """Of both halves, process groups of their own included; until then they can be interrupted."""
    _program(
        tmp_path / "bin" / "make",
        f"""case "$1" in check|test) ;; *) exit 0;; esac
        exec bash -c 'set -m; sleep 600 & echo $! $(grep SigIgn /proc/self/status) \
          > "{tmp_path}/'$1'.part"; mv "{tmp_path}/'$1'.part" "{tmp_path}/'$1'"; wait'""",
    )
    notes = [tmp_path / "check", tmp_path / "test"]
    run = subprocess.Popen(
        [ROOT / ".ci" / "run"],
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
    )
    while not all(note.exists() for note in notes):
        assert run.poll() is None
        time.sleep(0.01)
    run.terminate()
    assert run.wait() == 143
    for note in notes:
        pid, _, ignored = note.read_text().split()
        assert not int(ignored, 16) & 1 << signal.SIGINT - 1
        while (status := Path(f"/proc/{pid}/status")).exists() and "zombie" not in _text(status):
            time.sleep(0.01)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
