"""`outrider serve`: target, drafts and gateway as child processes, stopped together.

Prints one line on stdout when requests are answered. SIGINT or SIGTERM stops gateway, draft and
target in that order, a second one all of them at once. A draft that dies is started again; without
gateway or target the stack ends with exit code 1. Nothing here loads a model.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from functools import partial
from pathlib import Path

from services import probe
from services.serve_plan import LOOPBACK, Plan, PlannedDraft, dial_address
from services.serve_settings import NO_DRAFT, Placement
from services.stack import Child, ChildSpec, Part, Stack
from shared.errors import raise_problems
from shared.signals import call_at_signals


def serve(plan: Plan) -> int:
    """Runs a plan until SIGINT or SIGTERM; returns the exit code. On any but the first host of
    `--nnodes` this process becomes the target, which serves no requests there.

    Raises:
        SettingsError: a model is missing, a port is taken, or the log folder cannot be made.
    """
    is_first = plan.target.node_rank == 0
    problems = _model_problems(plan)
    problems += [*_busy_ports(plan), *_log_problems(plan)] if is_first else []
    raise_problems(problems)
    for notice in plan.notices:
        _to_stderr(f"note: {notice}")
    if not is_first:
        command = [sys.executable, "-m", "services.target", *plan.target_arguments]
        os.execv(sys.executable, command)
    return asyncio.run(_serve(plan))


async def _serve(plan: Plan) -> int:
    stop, at_once = asyncio.Event(), asyncio.Event()

    def end() -> None:
        if stop.is_set():
            at_once.set()
            return
        stop.set()
        _to_stderr(
            f"stopping; at most {grace_s(plan):g} s for requests to finish "
            f"(Ctrl-C again stops at once)"
        )

    call_at_signals(end)
    stack = Stack(parts(plan), plan.launcher.timeouts, _to_stderr)
    return await stack.run(stop, lambda: print(ready_line(plan), flush=True), at_once)


def grace_s(plan: Plan) -> float:
    """Returns the seconds that open requests get at a stop."""
    return min(plan.gateway.drain_grace_s, plan.launcher.stop_grace_s)


def parts(plan: Plan) -> tuple[Part, ...]:
    """Returns the parts in start order: a part comes after those that it depends on."""
    tls = plan.gateway.target_tls
    target = dial_address(plan.target.host, plan.target.port)
    spec = _spec(plan, "target", "services.target", plan.target_arguments)
    hosted = plan.drafts if plan.placement is Placement.EMBEDDED else ()
    hint = "\n".join(_hint(plan, draft) for draft in hosted) or None
    parts = [Part(Child(spec), lambda: probe.grpc_is_serving(target, tls), hint=hint)]
    maintenance = dial_address(plan.target.maintenance_host, plan.target.admin_port)
    num_drafts = len(plan.remote_drafts)
    for count, draft in enumerate(plan.remote_drafts, start=1):
        are_attached = partial(probe.has_attachments, maintenance, count, tls)
        all_are = partial(probe.has_attachments, maintenance, num_drafts, tls)
        arguments = (*draft.arguments, "--exit-when-refused")
        child = Child(_spec(plan, draft.name, "services.draft", arguments))
        hint = _hint(plan, draft)
        parts.append(Part(child, are_attached, is_expendable=True, hint=hint, is_back=all_are))
    if plan.learner_arguments:
        learner = _spec(plan, "learner", "services.draft.learner", plan.learner_arguments)
        parts.append(Part(Child(learner), _always_ready, is_expendable=True))
    gateway = Child(_spec(plan, "gateway", "gateway", plan.gateway_arguments))
    host, _, port = dial_address(plan.gateway.host, plan.gateway.port).rpartition(":")
    http_tls = plan.gateway.http_tls
    probe_tls = None if http_tls is None else http_tls.local_context(shown=tls)
    asks_clients = http_tls is not None and http_tls.client_ca is not None

    async def is_warm() -> bool:
        is_ready = await probe.http_is_ready(
            host, int(port), "/ready", probe_tls, asks_clients=asks_clients
        )
        return is_ready and await probe.has_generated(target, tls)

    parts.append(Part(gateway, is_warm))
    return tuple(parts)


async def _always_ready() -> bool:
    """The readiness check of a process that no request needs."""
    return True


def _hint(plan: Plan, draft: PlannedDraft) -> str:
    model = "no model"
    if draft.settings.algorithm.has_model:
        model = str(draft.settings.model_folder)
    return (
        f"the draft is {draft.algorithm}, {model}; the target is {plan.target.model_path}\n"
        f"Do they fit? A head must be made for the target, and a model have most of its tokens; "
        f"name another --speculative-draft-model-path, or take --speculative-algorithm NGRAM"
    )


def ready_line(plan: Plan) -> str:
    """Returns the line that says that requests are answered: URL, model, speculation and logs."""
    drafts = NO_DRAFT
    if plan.drafts:
        names = ", ".join(draft.algorithm for draft in plan.drafts)
        drafts = f"{names} ({plan.placement.value})"
    model = plan.gateway.model_name or plan.target.model_id
    scheme = "http" if plan.gateway.http_tls is None else "https"
    url = f"{scheme}://{dial_address(plan.gateway.host, plan.gateway.port)}"
    return (
        f"ready: {url}/v1  page: {url}/  model: {model}"
        f"  speculation: {drafts}  logs: {plan.launcher.log_dir}/"
    )


def _model_problems(plan: Plan) -> list[str]:
    named = [("--model-path", plan.target.model_path)]
    drafts = (draft.settings.speculative_draft_model_path for draft in plan.drafts)
    named += [("--speculative-draft-model-path", path) for path in drafts if path is not None]
    return [problem for flag, path in named if (problem := _folder_problem(flag, path))]


def _folder_problem(flag: str, path: Path) -> str | None:
    if not path.is_dir():
        return f"{flag} is {path}: there is no such folder, and a model of the Hub is OWNER/NAME"
    if not (path / "config.json").is_file():
        return f"{flag} is {path}, a folder without config.json; a model has one"
    return None


def _busy_ports(plan: Plan) -> list[str]:
    return [
        f"port {port} is taken on {LOOPBACK}: another server listens there; stop it, or set {flag}"
        for port, flag in plan.ports
        if not _can_bind(port)
    ]


def _can_bind(port: int) -> bool:
    with socket.socket() as listener:
        # The servers set it too: connections of an earlier run in TIME_WAIT do not block the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _log_problems(plan: Plan) -> list[str]:
    folder = plan.launcher.log_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return [f"--log-dir is {folder}, which cannot be made: {error.strerror}"]
    return []


def _spec(plan: Plan, name: str, module: str, arguments: tuple[str, ...]) -> ChildSpec:
    return ChildSpec(name, module, arguments, plan.launcher.log_dir / f"{name}.log")


def _to_stderr(text: str) -> None:
    print(f"serve: {text}", file=sys.stderr, flush=True)
