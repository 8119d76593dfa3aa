"""`outrider`, but for the loading of models: services also take folders that describe wide ones.

    python -m tests.bench.wide_serve serve FLAGS

See `wide_loading`. A 70B in bfloat16 is made on its GPUs in seconds, and on no disk.
"""

from __future__ import annotations

import sys

from services import serve
from services.cli.__main__ import main
from services.serve_plan import Plan
from services.stack import ChildSpec

_OWN_SPEC = serve._spec
_LOADING = ("services.target", "services.draft")


def spec(plan: Plan, name: str, module: str, arguments: tuple[str, ...]) -> ChildSpec:
    """Does what `services.serve` does for its processes, with `tests.bench.service` in between."""
    if module not in _LOADING:
        return _OWN_SPEC(plan, name, module, arguments)
    service = module.removeprefix("services.")
    return _OWN_SPEC(plan, name, "tests.bench.service", (service, *arguments))


if __name__ == "__main__":
    serve._spec = spec
    sys.exit(main())
