"""The target process: servers around one engine, from warm-up to drain."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from grpc import aio

from services.target.admin_service import TargetAdminServicer
from services.target.drafts.attachment import AttachmentTerms
from services.target.drafts.speculation_service import SpeculationServicer
from services.target.engine import Engine
from services.target.grammars.compiler import GrammarCompiler, GrammarLimits
from services.target.requests.admission import Admission, EventQueue, RequestTelemetry
from services.target.requests.generate_service import ServedModel, TargetServicer
from services.target.requests.request import Finished, GenerationRequest
from services.target.settings import TargetSettings
from services.target.vllm.vllm_engine_service import VllmEngineServicer
from shared.errors import EngineFailed
from shared.generation import Failed
from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.pb.outrider.speculation.v1 import speculation_service_pb2, speculation_service_pb2_grpc
from shared.pb.outrider.target.v1 import target_service_pb2, target_service_pb2_grpc
from shared.pb.vllm.grpc.engine import vllm_engine_pb2, vllm_engine_pb2_grpc
from shared.rpc.channel import MAX_MESSAGE_BYTES, USUAL_MESSAGE_BYTES
from shared.rpc.server import Lifecycle, bind, create_server, stop_servers
from shared.telemetry.start_up import start_phase
from shared.telemetry.tracing import NO_TRACER, Tracer
from shared.telemetry.vllm_metrics import VllmMetrics
from shared.telemetry.wire_meter import WireMeter
from shared.tokens import SamplingParams, StopParams

_SETTINGS = (
    *("dtype", "quantization", "kv_cache_dtype", "attention_backend", "device", "tp_size"),
    *("ep_size", "enable_dp_attention", "pp_size"),
    *("enable_deterministic_inference", "verification_mode", "context_length"),
    *("speculative_use_rejection_sampling", "speculative_use_block_verification"),
    *("speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
)
_SUFFIXES = (".json", ".safetensors", ".bin", ".jinja")
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 65_536


def output_fingerprint(settings: TargetSettings) -> str:
    """Returns 16 hexadecimal digits for the settings and the model files. Files are identified by
    size and samples of their bytes: reading them whole would take as long as loading them."""
    digest = hashlib.sha256()
    for name in _SETTINGS:
        digest.update(f"{name}={getattr(settings, name)}\n".encode())
    folder = Path(settings.model_path)
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        if path.suffix in _SUFFIXES:
            digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
            _add_samples(digest, path)
    return digest.hexdigest()[:16]


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    step = max(size // _NUM_SAMPLES, _SAMPLE_BYTES)
    with path.open("rb") as file:
        for offset in range(0, size, step):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))


logger = logging.getLogger(__name__)
_TARGET = target_service_pb2.DESCRIPTOR.services_by_name["TargetService"]
_SPECULATION = speculation_service_pb2.DESCRIPTOR.services_by_name["SpeculationService"]
_VLLM_ENGINE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
_ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]


class EmbeddedPort(Protocol):
    """A draft inside this process.

    Attributes:
        algorithm: algorithm of its drafter.
    """

    @property
    def algorithm(self) -> str: ...

    def attach(self, tokenizer_sha256: str) -> None:
        """Attaches to the running engine."""

    def take_weights(self, folder: Path, version: str) -> float:
        """See `HeadWeights.take`."""

    def stop(self) -> None:
        """Ends the draft's thread."""


def attachment_terms(settings: TargetSettings) -> AttachmentTerms:
    """Returns the terms on which every draft attaches."""
    return AttachmentTerms(
        mode=settings.verification,
        max_nodes=settings.max_tree_nodes,
        max_sequences=settings.max_draft_sequences,
        longest_wait_s=settings.candidate_wait_ms / 1000.0,
        feature_ring_rows=settings.feature_ring_rows,
    )


class TargetProcess:
    """Two gRPC servers, public and maintenance, around an engine.

    Attributes:
        port: the public port, after `start`.
        admin_port: the maintenance port, after `start`.
    """

    def __init__(
        self,
        engine: Engine,
        settings: TargetSettings,
        tokenizer_sha256: str,
        *,
        metrics: VllmMetrics | None = None,
        tracer: Tracer = NO_TRACER,
        wire: WireMeter | None = None,
    ) -> None:
        fingerprint = output_fingerprint(settings)
        model = ServedModel(settings.model_id, tokenizer_sha256, fingerprint)
        self._engine = engine
        self._settings = settings
        self._model = model
        engine.follow_weights(lambda: model.note_change("", engine.weight_version))
        self._embedded: EmbeddedPort | None = None
        self._tokenizer_sha256 = tokenizer_sha256
        self._services = [_TARGET, _SPECULATION]
        if settings.grpc_vllm_engine:
            self._services.append(_VLLM_ENGINE)
        self._lifecycle = Lifecycle([service.full_name for service in self._services])
        telemetry = RequestTelemetry(
            settings.model_id, metrics or VllmMetrics(), time.monotonic, tracer
        )
        self._grammars = GrammarCompiler(
            settings.tokenizer_folder,
            vocab_size=engine.limits.vocab_size,
            eos_token_ids=engine.limits.eos_token_ids,
            limits=GrammarLimits(settings.max_grammar_bytes, settings.grammar_timeout_s),
        )
        self._admission = Admission(engine, self._grammars, self._lifecycle, telemetry)
        self._target = TargetServicer(self._admission, model)
        self._vllm_engine: VllmEngineServicer | None = None
        if settings.grpc_vllm_engine:
            self._vllm_engine = VllmEngineServicer(self._admission, settings)
        terms = attachment_terms(settings)
        self._speculation = SpeculationServicer(engine, model, terms, self._lifecycle, wire)
        self._servers: list[aio.Server] = []
        self._draft_settings: Mapping[str, str] = {}
        self.port = 0
        self.admin_port = 0

    def embed(self, draft: EmbeddedPort, settings: Mapping[str, str]) -> None:
        """Hosts a draft in this process; call it before `start`.

        Args:
            settings: the draft's settings, for `GetServerInfo`.
        """
        self._embedded = draft
        self._draft_settings = settings

    async def start(self, before_serving: Callable[[], None] = lambda: None) -> None:
        """Starts servers, engine and embedded draft; SERVING after a warm-up generation.

        Args:
            before_serving: called right before the process accepts requests.

        Raises:
            SettingsError: a port is taken.
        """
        public = await create_server(
            self._services,
            self._register,
            self._lifecycle,
            max_receive_bytes=min(
                USUAL_MESSAGE_BYTES + self._engine.largest_projection_bytes, MAX_MESSAGE_BYTES
            ),
        )
        admin = await create_server([_ADMIN], self._register_admin, self._lifecycle)
        self._servers = [public, admin]
        settings, tls = self._settings, self._settings.server_tls
        self.port = bind(public, f"{settings.host}:{settings.port}", tls)
        self.admin_port = bind(admin, f"{settings.maintenance_host}:{settings.admin_port}", tls)
        for server in self._servers:
            await server.start()
        self._engine.start()
        if self._embedded is not None:
            self._embedded.attach(self._tokenizer_sha256)
        with start_phase("warm-up"):
            num_tokens = warm_up_tokens(self._engine, settings.chunked_prefill_size)
            most_at_once = min(settings.max_running_requests, settings.max_queued_requests)
            await warm_up(self._engine, num_tokens, most_at_once)
        before_serving()
        await self._lifecycle.activate()

    async def run_until(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set.

        Raises:
            EngineFailed: the engine thread died; the process cannot serve any more.
        """
        stopped, died = asyncio.create_task(stop.wait()), asyncio.wrap_future(self._engine.death)
        await asyncio.wait((stopped, died), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not stop.is_set():
            await self._lifecycle.drain()
            raise EngineFailed.of()

    async def stop(self, grace_s: float) -> None:
        """Reports NOT_SERVING, refuses new requests, lets running ones finish, then stops."""
        await stop_servers(self._servers, self._lifecycle, self._drain, grace_s=grace_s)
        await asyncio.to_thread(self._engine.stop)
        self._grammars.close()
        if self._embedded is not None:
            await asyncio.to_thread(self._embedded.stop)

    async def _drain(self, grace_s: float) -> int:
        """Waits for requests, then asks drafts to leave; returns the number of requests left."""
        num_left = await self._lifecycle.wait_idle(grace_s)
        self._speculation.drain(grace_s=1.0)
        return num_left

    def _register(self, server: aio.Server) -> None:
        target_service_pb2_grpc.add_TargetServiceServicer_to_server(self._target, server)
        speculation_service_pb2_grpc.add_SpeculationServiceServicer_to_server(
            self._speculation, server
        )
        if self._vllm_engine is not None:
            vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._vllm_engine, server)

    def _register_admin(self, server: aio.Server) -> None:
        servicer = TargetAdminServicer(
            self._engine,
            self._settings,
            self._lifecycle,
            drain=self._drain,
            draft_settings=self._draft_settings,
            update_draft=None if self._embedded is None else self._update_draft,
        )
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)

    async def _update_draft(self, folder: Path, version: str) -> float:
        assert self._embedded is not None
        pause_s = await asyncio.to_thread(self._embedded.take_weights, folder, version)
        self._engine.draft_updated()
        self._model.note_change(self._embedded.algorithm, version)
        return pause_s


# Warm-up generations, so that no request pays for set-up on first use.

_NUM_OUTPUT_TOKENS = 2
_NUM_LANE_TOKENS = 12
# Kernels are specialised by length: one row, a few rows, multiples of 16, and other lengths.
_PROMPT_LENGTHS = (2, 3, 9, 16, 17, 25, 33, 64, 100, 129, 300, 512, 777, 1024)
# Concurrent prompts, and their lengths: matrix products of other sizes use other kernels.
_GROUP_SIZES = (2, 4, 8, 16, 32, 64)
_GROUP_LENGTHS = (9, 16, 25, 65)
# Behind a cached prefix, attention has few rows and many keys.
_PREFIX_LENGTH = 512
_SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2),
    SamplingParams(temperature=0.7, frequency_penalty=0.5, logit_bias={0: -1.0}, seed=3),
)


def warm_up_tokens(engine: Engine, chunk_tokens: int) -> int:
    """Returns the number of tokens of the longest warm-up prompt. On a GPU it is as long as a step
    may compute, so that missing memory is found now."""
    if engine.device.type != "cuda":
        return 1
    return max(1, min(chunk_tokens, engine.limits.max_sequence_tokens - _NUM_OUTPUT_TOKENS))


async def warm_up(engine: Engine, num_prompt_tokens: int, most_at_once: int = 1) -> None:
    """Generates with prompts of many lengths and every kind of sampling; on a CPU only with the
    longest prompt. At the end the prefix cache is flushed, and how fast drafts were is forgotten.

    Args:
        num_prompt_tokens: length of the longest prompt.
        most_at_once: most requests that may wait or run.

    Raises:
        OutriderError: the engine cannot serve.
    """
    await _generate(engine, [_request(engine, 0, num_prompt_tokens, _NUM_OUTPUT_TOKENS)])
    if engine.device.type == "cuda":
        await _warm_up_groups(engine, num_prompt_tokens, most_at_once)
    await asyncio.wrap_future(engine.flush_prefix_cache())
    # Kernels were compiled and graphs captured, and texts of one token are no user's.
    await asyncio.wrap_future(engine.renew_policies())


async def _warm_up_groups(engine: Engine, num_prompt_tokens: int, most_at_once: int) -> None:
    groups = [[length] for length in _PROMPT_LENGTHS]
    groups.append(list(_PROMPT_LENGTHS[:most_at_once]))
    groups += [[length] * size for size in _GROUP_SIZES for length in _GROUP_LENGTHS]
    prefix = (0,) * min(_PREFIX_LENGTH, num_prompt_tokens // 2)
    for group in groups:
        for shared in ((), prefix):
            if len(group) > most_at_once or len(shared) + max(group) >= num_prompt_tokens:
                continue
            requests = [
                _request(engine, key, length, _NUM_LANE_TOKENS, shared)
                for key, length in enumerate(group)
            ]
            await _generate(engine, requests)


def _request(
    engine: Engine,
    key: int,
    num_prompt_tokens: int,
    num_output_tokens: int,
    prefix: tuple[int, ...] = (),
) -> GenerationRequest:
    """Returns a request whose prompt differs from all others behind the prefix."""
    token_id = (31 * num_prompt_tokens + key) % engine.limits.vocab_size
    return GenerationRequest(
        request_id="warm-up",
        prompt_token_ids=(*prefix, *(token_id,) * num_prompt_tokens),
        sampling=_SAMPLINGS[(key + num_prompt_tokens) % len(_SAMPLINGS)],
        stop=StopParams(num_output_tokens, ignore_eos=True),
        arrival_s=time.monotonic(),
        top_logprobs=1 if key == 1 else None,
    )


async def _generate(engine: Engine, requests: Sequence[GenerationRequest]) -> None:
    stream = EventQueue(asyncio.get_running_loop())
    for key, request in enumerate(requests):
        engine.submit(request, stream, key)
    num_left = len(requests)
    while num_left:
        for _, event in await stream.next_batch():
            if isinstance(event, Failed):
                raise event.error
            num_left -= isinstance(event, Finished)
