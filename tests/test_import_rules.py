"""Who may import whom. Read the rules here as the map of the code base."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("shared", "services", "gateway")

# Lower layers of the torch half never import higher ones.
TORCH_LAYERS = ("kernels", "kv", "layers", "models", "runtime")

# Torch-free: the gateway runs where torch is not installed, policies are tested without it.
TORCH_FREE = (
    "gateway",
    "shared.errors",
    "shared.settings",
    "shared.tokens",
    "shared.pb",
    "shared.rpc",
    "shared.telemetry",
    "shared.kv.pages",
    "services.serve",
    "services.target.attachments",
    "services.target.scheduler",
    "services.target.sequence",
)

# Files that may see protobuf and grpc: the rest deals in dataclasses.
WIRE_PREFIXES = ("shared.rpc", "shared.pb")
WIRE_NAMES = ("attach_client", "targets", "probe", "process", "__main__")
WIRE_SUFFIXES = ("_service", "_messages", "_codec")


def _imports(source: str) -> set[str]:
    """Returns the dotted names a module imports, anywhere in it; `from a import b` gives `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _modules() -> dict[str, set[str]]:
    """Returns every module of ours with what it imports."""
    return {
        _module_name(path): _imports(path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def _within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _violations(importers: Iterator[str], *forbidden: str) -> list[str]:
    modules = _modules()
    return [
        f"{importer} imports {name}"
        for importer in importers
        for name in sorted(modules[importer])
        if _within(name, *forbidden)
    ]


def _select(*packages: str) -> Iterator[str]:
    return (name for name in _modules() if _within(name, *packages))


def test_the_reader_sees_every_form_of_import() -> None:
    source = "import a.b\nfrom c.d import e\ndef f():\n    from g import h as i\n"
    assert _imports(source) == {"a.b", "c.d.e", "g.h"}


@pytest.mark.parametrize("service", ["gateway", "services.draft", "services.target"])
def test_services_meet_only_in_the_contracts(service: str) -> None:
    others = {"gateway", "services.draft", "services.target"} - {service}
    # An embedded draft is composed by the target's entry point and nowhere else.
    importers = (m for m in _select(service) if m != "services.target.__main__")
    assert _violations(importers, *others) == []


def test_only_the_entry_point_of_the_target_composes_a_draft() -> None:
    assert _violations(_select("services.target.__main__"), "gateway") == []


def test_shared_imports_no_service() -> None:
    assert _violations(_select("shared"), "services", "gateway") == []


@pytest.mark.parametrize("layer", TORCH_LAYERS[:-1])
def test_lower_layers_do_not_import_higher_ones(layer: str) -> None:
    higher = TORCH_LAYERS[TORCH_LAYERS.index(layer) + 1 :]
    forbidden = [f"shared.{name}" for name in higher]
    assert _violations(_select(f"shared.{layer}"), *forbidden) == []


def test_speculation_is_mathematics_over_torch_and_tokens() -> None:
    modules = _modules()
    allowed = ("shared.speculation", "shared.tokens", "shared.errors")
    for importer in _select("shared.speculation"):
        ours = {name for name in modules[importer] if _within(name, *PACKAGES)}
        assert {name for name in ours if not _within(name, *allowed)} == set(), importer


def test_the_torch_free_half_does_not_name_torch() -> None:
    assert _violations(_select(*TORCH_FREE), "torch", "triton", "transformers") == []


def test_the_torch_free_half_runs_where_torch_is_not_installed() -> None:
    names = [name for name in _select(*TORCH_FREE) if not name.endswith("__main__")]
    program = (
        "import importlib, sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'triton', 'transformers'):\n"
        "            raise ModuleNotFoundError(f'{name} is not installed', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program, *names]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def _may_see_the_wire(module: str) -> bool:
    name = module.rpartition(".")[2]
    return _within(module, *WIRE_PREFIXES) or name in WIRE_NAMES or name.endswith(WIRE_SUFFIXES)


def test_protobuf_and_grpc_stay_in_the_adapters() -> None:
    importers = (module for module in _modules() if not _may_see_the_wire(module))
    wire = ("grpc", "google.protobuf", "grpc_health", "grpc_status", "shared.pb")
    assert _violations(importers, *wire) == []


def test_only_settings_and_entry_points_read_the_environment() -> None:
    readers = (
        _module_name(path)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "os.environ" in path.read_text() or "os.getenv" in path.read_text()
    )
    assert [module for module in readers if not module.endswith(("settings", "__main__"))] == []
