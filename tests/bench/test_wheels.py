"""Which wheels travel to a host without a package index."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.bench.wheels import (
    PRESENT,
    ROOT,
    NotPinned,
    needed_names,
    pinned,
    project_roots,
    read_pins,
)


def test_what_is_needed_is_pinned_and_leaves_out_what_the_host_has() -> None:
    names = needed_names(project_roots(), PRESENT, "3.12")
    assert {"fastapi", "pydantic-core", "grpcio", "orjson", "jiter", "uvloop"} <= set(names)
    assert not PRESENT & set(names)
    pins = read_pins((ROOT / "constraints.txt").read_text())
    assert len(pinned(names, pins)) == len(names)


def test_a_package_without_a_version_is_named() -> None:
    with pytest.raises(NotPinned, match="no version of b, c"):
        pinned(["a", "b", "c"], {"a": "A==1"})


def test_pins_are_found_however_a_name_is_spelled() -> None:
    pins = read_pins("# a comment\nJinja2==3.1.6\npydantic_core==2.50.4\n")
    assert pinned(["jinja2", "pydantic-core"], pins) == ["Jinja2==3.1.6", "pydantic_core==2.50.4"]


def test_a_stack_is_planned_without_the_packages_of_tests_and_tracing() -> None:
    """What writes certificates, traces and tests is not installed where the stack serves."""
    absent = ("cryptography", "opentelemetry.sdk", "httpx", "yaml", "huggingface_hub", "grpc_tools")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
    code += "from services import serve, serve_line, serve_plan\nimport gateway.__main__"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
