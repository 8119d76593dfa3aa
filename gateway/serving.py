"""State shared by the routes of every interface: targets, tokenizer, limits and counters."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from gateway.answer import Answer, SchemaChecks
from gateway.api_keys import Quotas
from gateway.metrics import GatewayMetrics
from gateway.model_text import ModelText
from gateway.planner import Planner
from gateway.pool import TargetPool
from gateway.responses.store import ResponseStore
from gateway.settings import GatewaySettings
from gateway.workers import WorkerPlace
from shared.errors import FailedPrecondition, Unavailable
from shared.rpc.admin_client import TargetAdmin
from shared.rpc.server import Lifecycle, State
from shared.telemetry.tracing import NO_TRACER, Tracer
from shared.version import package_version


@dataclass(slots=True)
class Gateway:
    """The objects that the routes share. None of them is replaced.

    Attributes:
        quotas: the clients and their limits.
        place: this worker's index and sockets; None for the only process.
        response_store: store of `/v1/responses`; None stores nothing.
        start_time_s: seconds since the epoch.
    """

    settings: GatewaySettings
    pool: TargetPool
    text: ModelText
    quotas: Quotas
    place: WorkerPlace | None = None
    response_store: ResponseStore | None = None
    tracer: Tracer = NO_TRACER

    metrics: GatewayMetrics = field(init=False)
    planner: Planner = field(init=False)
    lifecycle: Lifecycle = field(init=False, default_factory=lambda: Lifecycle([]))
    open_answers: set[Answer] = field(init=False, default_factory=set)
    schema_checks: SchemaChecks = field(init=False, default_factory=SchemaChecks)
    version: str = field(init=False, default_factory=package_version)
    start_time_s: float = field(init=False, default_factory=time.time)

    def __post_init__(self) -> None:
        self.metrics = GatewayMetrics(self.pool, self.quotas)
        self.planner = Planner(self.text, self.settings)

    def abort(self, request_id: str | None, owner: str | None = None) -> int:
        """Aborts the answers with this id or `x-request-id`; returns how many there were.

        Args:
            request_id: None aborts all.
            owner: aborts only answers of this owner; None aborts everybody's.
        """
        matches = [
            answer
            for answer in self.open_answers
            if request_id in (None, answer.plan.request_id, answer.plan.generations[0].request_id)
            and owner in (None, answer.owner)
        ]
        for answer in matches:
            answer.abort()
        return len(matches)

    def end_answers(self, grace_s: float) -> None:
        """Fails the answers that are left at the end of a drain's grace."""
        message = f"the gateway stops; it gave requests {grace_s:g} s to finish"
        for answer in self.open_answers:
            answer.abort(Unavailable(message, reason="SERVER_DRAINING", retry_after_s=1.0))

    def target_admins(self) -> list[TargetAdmin]:
        """Returns the targets' maintenance ports.

        Raises:
            FailedPrecondition: none is known.
        """
        addresses, tls = self.settings.maintenance_addresses, self.settings.target_tls
        if not addresses:
            message = "the targets' maintenance ports are not known; set target_maintenance"
            raise FailedPrecondition(message, reason="TARGET_MAINTENANCE_UNSET")
        return [TargetAdmin(address, tls) for address in addresses]

    def health(self) -> tuple[HTTPStatus, dict[str, Any]]:
        """Returns 200 while requests can be served, else 503, with the state of every target."""
        is_serving = self.pool.is_serving and self.lifecycle.state is not State.DRAINING
        detail = {
            "status": "serving" if is_serving else "not_serving",
            "lifecycle": self.lifecycle.state.value,
            "targets": [
                {"address": link.address, "state": link.state.value, "detail": link.detail}
                for link in self.pool.links
            ],
        }
        return HTTPStatus.OK if is_serving else HTTPStatus.SERVICE_UNAVAILABLE, detail
