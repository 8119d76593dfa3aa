"""State shared by the routes of every interface: targets, tokenizer, limits and counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from gateway.answer import OpenAnswers
from gateway.api_keys import Quotas
from gateway.limits import RequestLimits
from gateway.metrics import GatewayMetrics
from gateway.model_text import ModelText
from gateway.planner import Planner
from gateway.pool import TargetPool
from gateway.responses.store import ResponseStore
from gateway.schema_check import SchemaChecks
from gateway.workers import WorkerPlace
from shared.errors import FailedPrecondition
from shared.rpc.admin_client import TargetAdmin
from shared.rpc.lifecycle import Lifecycle, State
from shared.telemetry.tracing import NO_TRACER, Tracer
from shared.tls import ClientTls


@dataclass(slots=True)
class Gateway:
    """The objects that the routes share. None of them is replaced.

    Attributes:
        start_time_s: seconds since the epoch.
        quotas: the clients and their limits.
        cors_origins: sites whose pages may call the gateway from a browser; none unless listed.
        place: among the workers of one port; None for the only process.
        response_store: of `/v1/responses`; None keeps nothing.
        target_maintenance: `host:port` of the targets' maintenance ports; may be empty.
        remote_operators: whether weights may be changed from other hosts.
    """

    pool: TargetPool
    text: ModelText
    limits: RequestLimits
    metrics: GatewayMetrics
    lifecycle: Lifecycle
    open_answers: OpenAnswers
    version: str
    start_time_s: float
    quotas: Quotas = field(default_factory=Quotas)
    cors_origins: tuple[str, ...] = ()
    place: WorkerPlace | None = None
    response_store: ResponseStore | None = None
    target_maintenance: tuple[str, ...] = ()
    target_tls: ClientTls | None = None
    remote_operators: bool = False
    tracer: Tracer = NO_TRACER
    schema_checks: SchemaChecks = field(default_factory=SchemaChecks)

    planner: Planner = field(init=False)

    def __post_init__(self) -> None:
        self.planner = Planner(self.text, self.limits)

    def target_admins(self) -> list[TargetAdmin]:
        """Returns the targets' maintenance ports.

        Raises:
            FailedPrecondition: none is known.
        """
        if not self.target_maintenance:
            message = "the targets' maintenance ports are not known; set target_maintenance"
            raise FailedPrecondition(message, reason="TARGET_MAINTENANCE_UNSET")
        return [TargetAdmin(address, self.target_tls) for address in self.target_maintenance]

    def health(self) -> tuple[HTTPStatus, dict[str, Any]]:
        """Returns 200 when requests would be answered, else 503, with the reasons."""
        serving = self.pool.is_serving and self.lifecycle.state is not State.DRAINING
        detail = {
            "status": "serving" if serving else "not_serving",
            "lifecycle": self.lifecycle.state.value,
            "targets": [
                {"address": link.address, "state": link.state.value, "detail": link.detail}
                for link in self.pool.links
            ],
        }
        return HTTPStatus.OK if serving else HTTPStatus.SERVICE_UNAVAILABLE, detail
