"""Who may import whom. Read the rules here as the map of the code base.

Each rule is a function from sources to violations, so that it can be shown to fail: every one is
given a module that breaks it.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("shared", "services", "gateway")
SERVICES = ("gateway", "services.draft", "services.target")

# Lower layers of the torch half never import higher ones.
TORCH_LAYERS = ("kernels", "kv", "layers", "models", "runtime")

# Torch-free: the gateway runs where torch is not installed, policies are tested without it.
TORCH_FREE = (
    "gateway",
    "shared.errors",
    "shared.hub",
    "shared.inbox",
    "shared.model_options",
    "shared.settings",
    "shared.settings_field",
    "shared.settings",
    "shared.settings",
    "shared.tls",
    "shared.model_files",
    "shared.tokens",
    "shared.pb",
    "shared.rpc",
    "shared.sampling_defaults",
    "shared.sampling_defaults",
    "shared.telemetry",
    "shared.text",
    "shared.kv.leases",
    "shared.ngram",
    "services.demo",
    "services.serve",
    "services.cli",
    "services.embedded_settings",
    "services.draft.process",  # an NGRAM draft
    "services.draft.drafter_factory",
    "services.draft.drafters.ngram",
    "services.draft.settings",
    "services.target.settings",
    "services.target.drafts.attachments",
    "services.target.scheduler",
    "services.target.sequence",
)
TORCH = ("torch", "triton", "transformers")

# Files that may see protobuf and grpc: the rest deals in dataclasses.
WIRE = ("grpc", "google", "grpc_health", "grpc_reflection", "grpc_status", "shared.pb")
WIRE_PREFIXES = ("shared.rpc", "shared.pb")
WIRE_NAMES = ("attach_client", "target_link", "probe", "process", "__main__")
WIRE_SUFFIXES = ("_service", "_messages", "_codec")

Sources = Mapping[str, str]
Rule = Callable[[Sources], list[str]]


@functools.cache
def _sources() -> Sources:
    """Returns the text of every module of ours by its dotted name."""
    return {
        _module_name(path): path.read_text()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _imports(source: str) -> frozenset[str]:
    """Returns the dotted names a module imports, anywhere in it; `from a import b` gives `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def _within(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _select(sources: Sources, *packages: str) -> Sources:
    return {name: source for name, source in sources.items() if _within(name, packages)}


def _violations(importers: Sources, *forbidden: str) -> list[str]:
    return [
        f"{importer} imports {name}"
        for importer, source in importers.items()
        for name in sorted(_imports(source))
        if _within(name, forbidden)
    ]


def services_meet_only_in_the_contracts(sources: Sources) -> list[str]:
    found: list[str] = []
    for service in SERVICES:
        others = set(SERVICES) - {service}
        for name, source in _select(sources, service).items():
            # An embedded draft is composed by the target's entry point and nowhere else.
            allowed = {"services.draft"} if name == "services.target.__main__" else set()
            found += _violations({name: source}, *(others - allowed))
    return found


def shared_imports_no_service(sources: Sources) -> list[str]:
    return _violations(_select(sources, "shared"), "services", "gateway")


def the_torch_free_half_does_not_name_torch(sources: Sources) -> list[str]:
    return _violations(_select(sources, *TORCH_FREE), *TORCH)


def lower_layers_do_not_import_higher_ones(sources: Sources) -> list[str]:
    found: list[str] = []
    for index, layer in enumerate(TORCH_LAYERS):
        higher = [f"shared.{name}" for name in TORCH_LAYERS[index + 1 :]]
        found += _violations(_select(sources, f"shared.{layer}"), *higher)
    return found


def speculation_is_mathematics_over_torch_and_tokens(sources: Sources) -> list[str]:
    allowed = ("shared.speculation", "shared.tokens", "shared.errors")
    return [
        f"{importer} imports {name}"
        for importer, source in _select(sources, "shared.speculation").items()
        for name in sorted(_imports(source))
        if _within(name, PACKAGES) and not _within(name, allowed)
    ]


def protobuf_and_grpc_stay_in_the_adapters(sources: Sources) -> list[str]:
    inner = {name: text for name, text in sources.items() if not _may_see_the_wire(name)}
    return _violations(inner, *WIRE)


def _may_see_the_wire(module: str) -> bool:
    name = module.rpartition(".")[2]
    return _within(module, WIRE_PREFIXES) or name in WIRE_NAMES or name.endswith(WIRE_SUFFIXES)


def only_settings_and_entry_points_read_the_environment(sources: Sources) -> list[str]:
    return [
        f"{name} reads the environment"
        for name, source in sources.items()
        if ("os.environ" in source or "os.getenv" in source)
        and not name.endswith(("settings", "__main__"))
    ]


def modules_hold_no_state_and_do_no_work(sources: Sources) -> list[str]:
    return [
        f"{name}:{node.lineno} {ast.unparse(node).splitlines()[0]}"
        for name, source in sources.items()
        if not _within(name, ["shared.pb"])
        for node in ast.parse(source).body
        if not _is_declaration(node)
    ] + [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Global)
    ]


def _is_declaration(node: ast.stmt) -> bool:
    """Whether a top-level statement defines something and changes nothing."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.ClassDef():
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.If():  # `TYPE_CHECKING`, or the start of an entry point
            return ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return _is_constant(name, value)
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=value):
            return all(_is_constant(ast.unparse(name), value) for name in names)
        case ast.AnnAssign(target=ast.Name(id=name), value=value):
            return value is not None and _is_constant(name, value)
    return False


def _is_constant(name: str, value: ast.expr) -> bool:
    """Constants and type names begin with a capital. Loggers and context variables are Python's
    own registries; they are asked for, not owned."""
    made_by = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return (
        name.lstrip("_")[:1].isupper()
        or name == "__all__"
        or made_by in ("logging.getLogger", "ContextVar")
    )


RULES: tuple[Rule, ...] = (
    services_meet_only_in_the_contracts,
    shared_imports_no_service,
    the_torch_free_half_does_not_name_torch,
    lower_layers_do_not_import_higher_ones,
    speculation_is_mathematics_over_torch_and_tokens,
    protobuf_and_grpc_stay_in_the_adapters,
    only_settings_and_entry_points_read_the_environment,
    modules_hold_no_state_and_do_no_work,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: Rule) -> None:
    assert rule(_sources()) == []


BREAKS: tuple[tuple[Rule, str, str], ...] = (
    (services_meet_only_in_the_contracts, "gateway.app", "import services.target.engine"),
    (services_meet_only_in_the_contracts, "gateway.app", "from services import draft"),
    (services_meet_only_in_the_contracts, "services.draft.engine", "from gateway import app"),
    (services_meet_only_in_the_contracts, "services.target.x", "from services.draft import engine"),
    (services_meet_only_in_the_contracts, "services.target.__main__", "import gateway.app"),
    (services_meet_only_in_the_contracts, "services.draft.__main__", "import services.target.x"),
    (shared_imports_no_service, "shared.kv.pool", "from services.target import engine"),
    (shared_imports_no_service, "shared.rpc.x", "def f():\n    import gateway"),
    (the_torch_free_half_does_not_name_torch, "gateway.text.x", "import torch.nn"),
    (the_torch_free_half_does_not_name_torch, "services.target.scheduler", "import torch"),
    (the_torch_free_half_does_not_name_torch, "shared.rpc.x", "from transformers import A"),
    (lower_layers_do_not_import_higher_ones, "shared.kernels.x", "from shared.kv import pool"),
    (lower_layers_do_not_import_higher_ones, "shared.models.x", "from shared.runtime import a"),
    (speculation_is_mathematics_over_torch_and_tokens, "shared.speculation.x", "import shared.kv"),
    (protobuf_and_grpc_stay_in_the_adapters, "services.target.engine", "from grpc import aio"),
    (protobuf_and_grpc_stay_in_the_adapters, "gateway.app", "from shared.pb.outrider import x"),
    (protobuf_and_grpc_stay_in_the_adapters, "services.target.x", "import google.protobuf"),
    (only_settings_and_entry_points_read_the_environment, "shared.kv.x", "os.environ['A']"),
    (only_settings_and_entry_points_read_the_environment, "gateway.x", "os.getenv('A')"),
    (modules_hold_no_state_and_do_no_work, "shared.x", "cache = {}"),
    (modules_hold_no_state_and_do_no_work, "shared.x", "pool: Pool = Pool()"),
    (modules_hold_no_state_and_do_no_work, "shared.x", "configure()"),
    (modules_hold_no_state_and_do_no_work, "shared.x", "try:\n    import a\nexcept E:\n    a = 1"),
    (modules_hold_no_state_and_do_no_work, "shared.x", "REGISTRY['a'] = 1"),
    (modules_hold_no_state_and_do_no_work, "shared.x", "def f():\n    global A\n    A = 1"),
)


@pytest.mark.parametrize(("rule", "module", "source"), BREAKS)
def test_the_rule_sees_a_module_that_breaks_it(rule: Rule, module: str, source: str) -> None:
    [violation] = rule({module: source})
    assert violation.startswith(module)


def test_every_rule_is_shown_to_fail() -> None:
    assert {rule for rule, _, _ in BREAKS} == set(RULES)


KEEPS: tuple[tuple[Rule, str, str], ...] = (
    (services_meet_only_in_the_contracts, "services.target.__main__", "import services.draft.x"),
    (services_meet_only_in_the_contracts, "services.target.x", "import services.target.y"),
    (the_torch_free_half_does_not_name_torch, "shared.kv.pool", "import torch"),
    (lower_layers_do_not_import_higher_ones, "shared.models.x", "import shared.kernels.pointwise"),
    (protobuf_and_grpc_stay_in_the_adapters, "services.target.a_service", "import grpc"),
    (modules_hold_no_state_and_do_no_work, "x", "logger = logging.getLogger(__name__)"),
    (modules_hold_no_state_and_do_no_work, "x", "if __name__ == '__main__':\n    main()"),
)


@pytest.mark.parametrize(("rule", "module", "source"), KEEPS)
def test_the_rule_lets_what_is_allowed_pass(rule: Rule, module: str, source: str) -> None:
    assert rule({module: source}) == []


def test_the_reader_sees_every_form_of_import() -> None:
    source = "import a.b\nfrom c.d import e\ndef f():\n    from g import h as i\n"
    assert _imports(source) == {"a.b", "c.d.e", "g.h"}


def test_the_torch_free_half_is_all_there() -> None:
    missing = [name for name in TORCH_FREE if not _select(_sources(), name)]
    assert missing == []


def _import_without_torch(*names: str) -> subprocess.CompletedProcess[str]:
    """Imports modules in a fresh interpreter in which torch is not installed."""
    program = (
        "import importlib, sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {TORCH}:\n"
        "            raise ModuleNotFoundError(f'{name} is not installed', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-W", "error", "-c", program, *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_torch_free_half_runs_where_torch_is_not_installed() -> None:
    torch_free = _select(_sources(), *TORCH_FREE)
    names = [name for name in torch_free if not name.endswith("__main__")]
    result = _import_without_torch(*names)
    assert result.returncode == 0, result.stderr


def test_a_module_that_needs_torch_fails_where_it_is_not_installed() -> None:
    result = _import_without_torch("shared.kv.pool")
    assert result.returncode != 0
    assert "torch is not installed" in result.stderr
