"""Garbage while a process loads, and after."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from shared.garbage import collect_from_here, collect_none

ROOT = Path(__file__).parents[2]


def test_what_is_there_stays_and_the_rest_is_collected() -> None:
    try:
        collect_none()
        assert not gc.isenabled()
        num_frozen = gc.get_freeze_count()
        there = [object() for _ in range(10)]
        kept = [[each] for each in there]
        collect_from_here()
        assert gc.isenabled()
        assert gc.get_freeze_count() >= num_frozen + len(kept)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "line",
    [
        "import services.bound, runpy; runpy.run_module = lambda *_, **__: print(gc.isenabled()); "
        "sys.argv[1:] = ['module']; services.bound.main()",
        "import pickle; from services.bound import call_unpickled; "
        "call_unpickled(pickle.dumps((exec, ('print(not gc.isenabled())',))), globals())",
    ],
    ids=["a module", "a function"],
)
def test_a_child_collects_none_while_it_loads(line: str) -> None:
    command = [sys.executable, "-c", f"import gc, sys; {line}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
