"""The draft process: one engine, two gRPC servers, and a stream to each target."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from grpc import aio

from services.draft.attach_client import AttachClient, Backoff, ReloadTables
from services.draft.draft_service import DraftBackend, DraftServicer
from services.draft.drafter_factory import compiles_kernels, outcome_budget, use_device
from services.draft.drafters.drafter import Drafter
from services.draft.engine import DraftEngine, warm_up
from services.draft.events import WorkerIdentity
from services.draft.head_weights import HeadWeights
from services.draft.metrics import DraftMetrics, DraftRecorder
from services.draft.settings import DraftSettings
from shared.errors import EngineFailed, FailedPrecondition, Unavailable
from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.pb.outrider.draft.v1 import draft_service_pb2, draft_service_pb2_grpc
from shared.rpc.admin_service import AdminHooks, AdminServicer, ProcessInfo
from shared.rpc.server import Lifecycle, bind, create_server
from shared.settings import shown_settings
from shared.telemetry.wire_meter import WireMeter
from shared.version import package_version

_DRAFT = draft_service_pb2.DESCRIPTOR.services_by_name["DraftService"]
_ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
_MAX_RECEIVE_BYTES = 64 * 2**20  # features of a prompt, for `ProposeTree`
_ENGINE_WATCH_S = 0.5
_STOP_GRACE_S = 5.0

log = logging.getLogger(__name__)


class DraftProcess:
    """See the module.

    Attributes:
        port: port of DraftService, after `listen`.
        admin_port: port of AdminService, after `listen`.
    """

    def __init__(
        self,
        settings: DraftSettings,
        recorder: DraftRecorder | None = None,
        wire: WireMeter | None = None,
    ) -> None:
        self._settings = settings
        self._recorder = recorder or DraftRecorder()
        self._wire = wire or WireMeter()
        self._start_time_s = time.time()
        self._lifecycle = Lifecycle([_DRAFT.full_name])
        self._servicer = DraftServicer(self._lifecycle)
        self._servers: list[aio.Server] = []
        self._engine: DraftEngine | None = None
        self._weights: HeadWeights | None = None
        self._clients: list[AttachClient] = []
        self._runs: list[asyncio.Task[None]] = []
        self.port = 0
        self.admin_port = 0

    async def listen(self) -> None:
        """Starts both servers: health and AdminService answer, other calls get UNAVAILABLE.

        Raises:
            SettingsError: a port is taken.
        """
        public = await create_server(
            [_DRAFT], self._register, self._lifecycle, max_receive_bytes=_MAX_RECEIVE_BYTES
        )
        admin = await create_server([_ADMIN], self._register_admin, self._lifecycle)
        settings = self._settings
        tls = settings.server_tls
        self.port = bind(public, f"{settings.host}:{settings.port}", tls)
        self.admin_port = bind(admin, f"{settings.maintenance_host}:{settings.admin_port}", tls)
        self._servers = [public, admin]
        for server in self._servers:
            await server.start()

    async def serve(
        self,
        drafter: Drafter,
        identity: WorkerIdentity,
        before_serving: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the engine, drafts once as a warm-up, then attaches to the targets.

        Args:
            before_serving: called right before the process accepts requests and attaches.
        """
        is_on_gpu = compiles_kernels(self._settings)
        engine = DraftEngine(
            drafter,
            self._settings.shape,
            chunk_tokens=self._settings.chunked_prefill_size,
            max_sequences=self._settings.max_running_requests,
            is_pinned=self._settings.is_shape_pinned,
            outcome_budget=outcome_budget(self._settings),
            are_rows_cheap=is_on_gpu or not self._settings.algorithm.has_model,
            recorder=self._recorder,
            enter_thread=functools.partial(use_device, self._settings),
            # On a CPU the engine thread waits for a target in its rounds, so for one target only.
            num_targets=len(self._settings.target) if is_on_gpu else 1,
        )
        engine.start()
        self._engine = engine
        self._weights = HeadWeights(self._settings, drafter, engine)
        most = self._settings.max_running_requests if is_on_gpu else None
        await asyncio.to_thread(warm_up, engine, drafter.limits.feature_spec, most_at_once=most)
        reload_tables = await asyncio.to_thread(self._table_reload, drafter, engine)
        self._clients = [
            AttachClient(
                address,
                identity,
                engine,
                Backoff(),
                tls=self._settings.target_tls,
                wire=self._wire,
                reload_tables=reload_tables,
            )
            for address in self._settings.target
        ]
        self._servicer.load(
            DraftBackend(
                engine, identity, drafter.limits, lambda: [c.status for c in self._clients]
            )
        )
        before_serving()
        await self._lifecycle.activate()
        engine.prepare_when_idle()
        self._runs = [asyncio.create_task(client.run()) for client in self._clients]
        shape = engine.shape
        log.info(
            "serving on port %d, trees of %d,%d,%d (steps,topk,rows)",
            *(self.port, shape.num_steps, shape.topk, shape.num_draft_tokens),
        )

    def _table_reload(self, drafter: Drafter, engine: DraftEngine) -> ReloadTables | None:
        """Returns the function that reads borrowed tables again; None where none is borrowed."""
        if not self._settings.algorithm.reads_features:
            return None
        # A worker without a model runs where torch is not installed.
        from services.draft.drafters.table_service import BorrowedTables, borrowed_tensors

        borrowed = borrowed_tensors(self._settings, drafter)
        if borrowed is None or not borrowed.tables:
            return None

        def between_rounds(function: Callable[[], None]) -> None:
            def swap() -> None:
                function()
                drafter.retire_prefix_cache()

            engine.between_rounds(swap).result()

        return BorrowedTables(borrowed, between_rounds).reload

    @property
    def num_attached(self) -> int:
        """Number of targets that this draft is attached to."""
        return sum(client.status.attachment_id is not None for client in self._clients)

    def metrics(self) -> DraftMetrics:
        """Returns the metrics of the process, to be registered once."""
        return DraftMetrics(self._recorder.counters, self._live_figures)

    def _live_figures(self) -> Mapping[str, float]:
        """Called on the scraper's thread; empty before the engine has started."""
        engine = self._engine
        return {} if engine is None else self._with_links(engine.figures())

    async def _update(self, folder: Path, version: str) -> float:
        if self._weights is None:
            raise Unavailable.starting()
        pause_s = await asyncio.to_thread(self._weights.take, folder, version)
        for client in self._clients:
            client.weights_updated(version)
        return pause_s

    async def run_until(self, stop: asyncio.Event) -> None:
        """Waits for `stop`.

        Raises:
            EngineFailed: the engine died, so the process must end.
            FailedPrecondition: every target refused this draft permanently, and the settings say
                that this ends the process.
        """
        while not stop.is_set():
            links = [client.status for client in self._clients]
            is_refused = bool(links) and all(link.is_refused for link in links)
            if is_refused and self._settings.exit_when_refused:
                reasons = "; ".join(f"target {link.address}: {link.last_error}" for link in links)
                raise FailedPrecondition(f"refused for good by {reasons}", reason="DRAFT_REFUSED")
            if self._engine is not None and self._engine.has_failed:
                raise EngineFailed.of()
            for run in self._runs:
                if run.done():
                    run.result()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _ENGINE_WATCH_S)

    async def stop(self, grace_s: float = _STOP_GRACE_S) -> bool:
        """Reports NOT_SERVING, refuses work, detaches, stops the engine and closes the servers.

        Returns:
            Whether the engine's thread has ended. It may capture graphs for longer than the grace.
        """
        await self._lifecycle.drain()
        await self._detach()
        has_ended = True
        if self._engine is not None:
            has_ended = await asyncio.to_thread(self._engine.stop, grace_s)
        for server in self._servers:
            await server.stop(0.0)
        return has_ended

    async def _detach(self) -> None:
        for client in self._clients:
            client.detach()
        await asyncio.gather(*self._runs, return_exceptions=True)

    async def _drain(self, grace_s: float) -> int:
        """Detaches; a target needs no grace, because it continues without the draft."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._detach(), grace_s)
        return 0 if self._engine is None else self._engine.num_sequences

    async def _gauges(self) -> Mapping[str, float]:
        if self._engine is None:
            return {}
        gauges = await asyncio.wrap_future(self._engine.gauges())
        return self._with_links(gauges)

    def _with_links(self, gauges: Mapping[str, float]) -> Mapping[str, float]:
        num_swaps = 0 if self._weights is None else self._weights.num_swaps
        return {
            **gauges,
            "attached_target_count": float(self.num_attached),
            "weight_swap_count": float(num_swaps),
        }

    async def _flush(self) -> int:
        if self._engine is None:
            return 0
        return await asyncio.wrap_future(self._engine.flush_prefix_cache())

    def _register(self, server: aio.Server) -> None:
        draft_service_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, server)

    def _register_admin(self, server: aio.Server) -> None:
        version = package_version()
        settings = shown_settings(self._settings)
        info = ProcessInfo("draft", version, self._start_time_s, settings)
        hooks = AdminHooks(
            drain=self._drain,
            gauges=self._gauges,
            flush_prefix_cache=self._flush,
            update_draft=self._update,
        )
        servicer = AdminServicer(info, self._lifecycle, hooks)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
