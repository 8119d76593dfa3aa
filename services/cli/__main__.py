"""`outrider`: every command of the package.

outrider serve MODEL_FLAGS    target, drafts and gateway on this host; takes SGLang's lines
outrider check LINE           what `outrider serve LINE` would start, and what is wrong with it
outrider target | draft | gateway | learner     one service
outrider bench | tune         measurements, from a checkout of the source
outrider --version
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from shared.errors import OutriderError
from shared.version import package_version

_SERVICES = MappingProxyType(
    {
        "target": "services.target.__main__",
        "draft": "services.draft.__main__",
        "learner": "services.draft.learner.__main__",
        "gateway": "gateway.__main__",
    }
)
_EXTRAS = MappingProxyType(
    {
        **dict.fromkeys(("torch", "numpy", "safetensors", "transformers", "llguidance"), "engine"),
        **dict.fromkeys(
            ("fastapi", "pydantic", "uvicorn", "httptools", "orjson", "tokenizers", "jinja2"),
            "gateway",
        ),
    }
)
_HELP = frozenset(("--help", "-h"))
_CHECK_HELP = """usage: outrider check LINE

Says what `outrider serve LINE` would start, where and with how much memory, and what is wrong with
the line. It reads the models' configurations, starts nothing and fetches nothing.

LINE is a launch line of `outrider serve`, whose `--help` lists the flags, or of SGLang."""
_CHECKOUT_COMMANDS = MappingProxyType({"bench": "tests.bench.choose", "tune": "tests.tune"})


def main() -> int:
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("--version", "-V"):
        print(f"outrider {package_version()}")
        return 0
    if command in (*_HELP, "help"):
        print(__doc__)
        return 0
    try:
        if command in _COMMANDS:
            return _COMMANDS[command](arguments, os.environ)
        if command in _SERVICES:  # exits by itself if its settings are wrong
            sys.argv = [f"outrider-{command}", *arguments]
            runpy.run_module(_SERVICES[command], run_name="__main__", alter_sys=True)
            return 0
        if command in _CHECKOUT_COMMANDS:
            return _measure(command, arguments)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(
            f"outrider {command}: {error.name} is not installed: pip install 'outrider[{extra}]'",
            file=sys.stderr,
        )
        return 2
    except OutriderError as error:
        for line in error.message.splitlines():
            print(f"outrider {command}: {line}", file=sys.stderr)
        return 2
    commands = ", ".join((*_COMMANDS, *_SERVICES, *_CHECKOUT_COMMANDS))
    print(f"outrider: {command!r} is not a command; there are {commands}", file=sys.stderr)
    return 2


def _serve(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    from services.serve import serve
    from services.serve_line import help_text
    from services.serve_plan import make_plan, num_gpus

    if _HELP.intersection(arguments):
        print(help_text())
        return 0
    for name in ("torch", "llguidance", "fastapi"):  # one error instead of one for each child
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    return serve(make_plan(arguments, env, num_gpus(env)))


def _check(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    from services.serve_plan import make_plan, num_gpus

    if _HELP.intersection(arguments):
        print(_CHECK_HELP)
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: fetch nothing
    plan = make_plan(arguments, env, num_gpus(env))
    from services.check import check

    print(check(plan))
    return 0


def _measure(command: str, arguments: Sequence[str]) -> int:
    module = _CHECKOUT_COMMANDS[command]
    # An editable install makes only the product's packages importable, not the tests.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    if importlib.util.find_spec("tests") is None or importlib.util.find_spec(module) is None:
        print(
            f"outrider {command}: measurements are part of the source and not of the installed "
            f"package; run it in a checkout",
            file=sys.stderr,
        )
        return 2
    sys.argv = [f"outrider {command}", *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


_COMMANDS: Mapping[str, Callable[[Sequence[str], Mapping[str, str]], int]] = MappingProxyType(
    {"serve": _serve, "check": _check}
)

if __name__ == "__main__":
    sys.exit(main())
