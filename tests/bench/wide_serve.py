"""`outrider serve`, but for two things that a benchmark needs.

    python -m tests.bench.wide_serve serve [--targets N] [--drafts M] FLAGS

Services also load folders that describe wide models, see `wide_loading`: a 70B in bfloat16 is made
on its GPUs in seconds, and on no disk. And M equal drafts can feed N targets, each on a GPU of its
own, behind one gateway; the drafts have the GPUs after those of the targets.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial

from services import probe, serve
from services.cli.__main__ import main
from services.serve_plan import Plan, dial_address
from services.stack import Child, ChildSpec, Part

_OWN_SPEC, _OWN_PARTS = serve._spec, serve.parts
_LOADING = ("services.target", "services.draft")
_PORTS_A_TARGET, _PORTS_A_DRAFT = 10, 100


def spec(plan: Plan, name: str, module: str, arguments: tuple[str, ...]) -> ChildSpec:
    """Does what `services.serve` does for its processes, with `tests.bench.service` in between."""
    if module not in _LOADING:
        return _OWN_SPEC(plan, name, module, arguments)
    service = module.removeprefix("services.")
    return _OWN_SPEC(plan, name, "tests.bench.service", (service, *arguments))


def parts(num_targets: int, num_drafts: int, plan: Plan) -> tuple[Part, ...]:
    """Returns the parts of a stack with so many targets, and so many of each of its drafts."""
    first, *drafts, gateway = _OWN_PARTS(plan)
    target, is_gpu = plan.target, plan.target.device != "cpu"
    targets, admins, dialled = [first], list[str](), list[str]()
    for number in range(num_targets):
        offset = _PORTS_A_TARGET * number
        admins.append(dial_address(target.maintenance_host, target.admin_port + offset))
        if not number:
            continue
        ports = {
            "port": target.port + offset,
            "maintenance-port": target.admin_port + offset,
            "metrics-port": (target.metrics_port or target.port + 4) + offset,
        }
        own = [f"--{name}={port}" for name, port in ports.items()]
        own += [f"--device=cuda:{number}"] * is_gpu
        address = dial_address(target.host, ports["port"])
        dialled.append(f"--target={address}")
        child = spec(plan, f"target-{number}", "services.target", (*plan.target_arguments, *own))
        targets.append(Part(Child(child), partial(probe.grpc_is_serving, address)))

    async def are_attached(number: int) -> bool:
        found = [await probe.has_attachments(each, number) for each in admins]
        return all(found)

    fed: list[Part] = []
    for draft, part in zip(plan.remote_drafts, drafts, strict=True):
        for number in range(num_drafts):
            own = [*draft.arguments, *dialled]
            own += [f"--device=cuda:{num_targets + number}"] * is_gpu
            name, offset = draft.name, _PORTS_A_DRAFT * number
            if number:
                own += [f"--port={draft.settings.port + offset}"]
                own += [f"--maintenance-port={draft.settings.admin_port + offset}"]
                name = f"{draft.name}-{number}"
            process = Child(spec(plan, name, "services.draft", tuple(own)))
            fed.append(replace(part, child=process, is_ready=partial(are_attached, len(fed) + 1)))
    arguments = (*plan.gateway_arguments, *dialled)
    in_front = Child(spec(plan, "gateway", "gateway", arguments))
    return (*targets, *fed, replace(gateway, child=in_front))


def _main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--targets", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=1)
    flags, sys.argv[1:] = parser.parse_known_args()
    serve._spec = spec
    if flags.targets > 1 or flags.drafts > 1:
        serve.parts = partial(parts, flags.targets, flags.drafts)
    return main()


if __name__ == "__main__":
    sys.exit(_main())
