"""`VllmEngine`: the contract of the gateway `smg`, served by the same engine as `TargetService`."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import time
import zipfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from grpc import aio

from services.target.requests.admission import Admission
from services.target.requests.request import GenerationRequest
from services.target.settings import TargetSettings
from services.target.step_report import Clock
from services.target.vllm import vllm_engine_messages as messages
from services.target.vllm.open_choices import OpenChoices, TextStop
from shared.errors import CheckpointError, FailedPrecondition, InvalidArgument, OutriderError
from shared.pb.smg.grpc.common import common_pb2
from shared.pb.vllm.grpc.engine import vllm_engine_pb2 as pb
from shared.pb.vllm.grpc.engine import vllm_engine_pb2_grpc as pb_grpc
from shared.rpc.server import State
from shared.telemetry.tracing import (
    accepted_request_id,
    current_request_id,
    current_traceparent,
    new_request_id,
)
from shared.text import Tokenizer
from shared.version import package_version

logger = logging.getLogger(__name__)

_MIN_WINDOW_S = 1.0


class Throughput:
    """Tokens per second over a window between two calls, of `_MIN_WINDOW_S` or more.

    Calls before the window ends get the last rate, so that frequent calls do not make it jump.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = clock()
        self._since_tokens = 0
        self._rate = 0.0

    def rate(self, num_tokens: int) -> float:
        """Returns the rate.

        Args:
            num_tokens: all tokens since the start.
        """
        now_s = self._clock()
        elapsed_s = now_s - self._since_s
        if elapsed_s >= _MIN_WINDOW_S:
            self._rate = (num_tokens - self._since_tokens) / elapsed_s
            self._since_s, self._since_tokens = now_s, num_tokens
        return self._rate


_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.json", "config.json", "generation_config.json"),
    *("*.jinja", "*.model", "*.tiktoken"),
)
_LARGEST_FILE_BYTES = 256 * 2**20
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first time stamp that ZIP supports


def tokenizer_archive(folders: Sequence[Path]) -> tuple[bytes, str]:
    """Packs the tokenizer files, with which a gateway turns text into tokens and back. A file of an
    earlier folder hides a file of the same name in a later one.

    Returns:
        A ZIP archive and its SHA-256; equal files give equal archives.

    Raises:
        CheckpointError: there are no such files, or one is too large to be a tokenizer file.
    """
    paths: dict[str, Path] = {}
    for folder in folders:
        for pattern in _TOKENIZER_FILES:
            paths.update({path.name: path for path in folder.glob(pattern)} | paths)
    if not paths:
        raise CheckpointError(f"{folders[0]} holds no files of a tokenizer")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted(paths.items()):
            if path.stat().st_size > _LARGEST_FILE_BYTES:
                raise CheckpointError(f"{path} has more than {_LARGEST_FILE_BYTES:,} bytes")
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    data = packed.getvalue()
    return data, hashlib.sha256(data).hexdigest()


Context = aio.ServicerContext[Any, Any]

_ARCHIVE_CHUNK_BYTES = 64 * 1024


# Abstract to the type checker. Methods left out are UNIMPLEMENTED, see `ErrorInterceptor`.
_Servicer: Any = pb_grpc.VllmEngineServicer


class VllmEngineServicer(_Servicer):  # type: ignore[misc]
    """Serves one engine to gateways of other projects, without embeddings, profiler and events."""

    def __init__(self, admission: Admission, settings: TargetSettings) -> None:
        """Raises: CheckpointError: a file of the model folder cannot be used."""
        self._admission = admission
        self._engine = admission.engine
        self._settings = settings
        self._model_info = messages.model_info_message(settings, admission.engine.limits)
        self._open: dict[str, OpenChoices] = {}
        # Called on threads; two first calls at the same time may both read the files.
        self._tokenizer = cache(partial(Tokenizer.read, settings.tokenizer_folder))
        folders = (settings.tokenizer_folder, settings.model_path)
        self._archive = cache(partial(tokenizer_archive, folders))
        self._throughput = Throughput(admission.telemetry.clock)
        self._start_s = time.monotonic()
        self._last_request_s = 0.0

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        self._last_request_s = time.time()
        request_id = request.request_id or new_request_id()
        if request_id in self._open:
            raise InvalidArgument.of(
                "REQUEST_ID_DUPLICATE", "request_id", f"request {request_id} is open already"
            )
        log_id = accepted_request_id(request.request_id or current_request_id.get())
        opened = self._open[request_id] = OpenChoices(self._admission)
        try:
            await self._submit(request, log_id, opened)
            async for choice, delta in opened.outputs():
                if request.stream and delta is not None:
                    yield messages.chunk_message(choice, delta)
                if request.stream and choice.finished is not None:
                    yield messages.complete_message(choice, is_streamed=True)
            for choice in () if request.stream else opened.choices:
                yield messages.complete_message(choice, is_streamed=False)
        except OutriderError as error:
            opened.fail(error)
            raise
        finally:
            opened.cancel_all()
            del self._open[request_id]

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        for request_id in request.request_ids:
            opened = self._open.get(request_id)
            if opened is not None:
                opened.abort()
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        state = self._admission.lifecycle.state
        if self._engine.has_failed:
            return pb.HealthCheckResponse(healthy=False, message="the engine failed")
        return pb.HealthCheckResponse(healthy=state is State.ACTIVE, message=state.value)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        return self._model_info

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        settings = self._settings
        return pb.GetServerInfoResponse(
            active_requests=len(self._open),
            is_paused=self._admission.lifecycle.state is State.DRAINING,
            last_receive_timestamp=self._last_request_s,
            uptime_seconds=time.monotonic() - self._start_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype=settings.kv_cache_dtype.value,
            block_size=settings.page_size,
            model_dtype=settings.dtype.value,
            max_num_seqs=settings.max_running_requests,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        gauges = await asyncio.wrap_future(self._engine.gauges())
        metrics, model_id = self._admission.telemetry.metrics, self._settings.model_id
        load = messages.load_message(gauges, self._settings)
        load.gen_throughput = self._throughput.rate(metrics.count(model_id, "generation_tokens"))
        num_queries = metrics.count(model_id, "prefix_cache_queries")
        if num_queries:
            load.cache_hit_rate = metrics.count(model_id, "prefix_cache_hits") / num_queries
        loads = [] if request.dp_rank else [load]
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=package_version(),
            dp_rank_count=len(loads),
            loads=loads,
        )

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        if not request.timeout_s >= 0:
            raise InvalidArgument.of(
                "TIMEOUT_OUT_OF_RANGE",
                "timeout_s",
                f"timeout_s is {request.timeout_s:g}; it must be at least 0",
            )
        num_freed = await asyncio.wrap_future(self._engine.flush_prefix_cache())
        return common_pb2.FlushCacheResponse(success=True, message=f"{num_freed} pages were freed")

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        try:
            data, sha256 = await asyncio.to_thread(self._archive)
        except CheckpointError as error:
            logger.warning("no tokenizer to send: %s", error.message)
            message = "this target has no files of a tokenizer that it could send"
            raise FailedPrecondition(message, reason="TOKENIZER_MISSING") from error
        for start in range(0, len(data), _ARCHIVE_CHUNK_BYTES):
            end = start + _ARCHIVE_CHUNK_BYTES
            is_last = end >= len(data)
            yield common_pb2.GetTokenizerChunk(
                data=data[start:end], sha256=sha256 if is_last else ""
            )

    async def _submit(self, message: pb.GenerateRequest, log_id: str, opened: OpenChoices) -> None:
        """Starts the outputs of a request. The first one with text or stop strings reads the
        tokenizer.

        Raises:
            OutriderError: the request is refused.
        """
        self._admission.lifecycle.check_open()
        messages.check_supported(message)
        params = message.sampling_params
        prompt = messages.prompt_within(await self._prompt(message), params, self._engine.limits)
        parent, limits = current_traceparent.get(), self._engine.limits
        record = opened.begin(0, log_id, len(prompt), parent)
        now_s = self._admission.telemetry.clock()
        request = messages.generation_request(prompt, params, record, limits, now_s)
        grammar = messages.grammar_from_message(params)
        if grammar is not None:
            compiled = await self._admission.grammars.compile(grammar)
            request = replace(request, grammar=compiled)
        requests = messages.choice_requests(request, params)
        stops = [await self._text_stop(params, choice) for choice in requests]
        for index in range(1, len(requests)):
            record = opened.begin(index, log_id, len(prompt), parent)
            requests[index] = replace(requests[index], traceparent=record.traceparent)
        opened.submit(requests, stops)

    async def _prompt(self, message: pb.GenerateRequest) -> list[int]:
        if message.WhichOneof("input") != "text":
            return list(message.tokenized.input_ids)
        return await (await self._read_tokenizer("text")).encode(
            message.text, add_special_tokens=True
        )

    async def _text_stop(
        self, params: pb.SamplingParams, request: GenerationRequest
    ) -> TextStop | None:
        strings = messages.stop_strings(params)
        if not strings:
            return None
        return TextStop(
            await self._read_tokenizer("stop"),
            strings,
            skip_special_tokens=params.skip_special_tokens,
            silent_token_ids=self._engine.limits.end_token_ids(request.stop),
            num_ignored=request.stop.min_output_tokens,
        )

    async def _read_tokenizer(self, field: str) -> Tokenizer:
        """Raises:
        InvalidArgument: the target has no tokenizer, which `field` needs.
        """
        try:
            return await asyncio.to_thread(self._tokenizer)
        except CheckpointError as error:
            logger.warning("no text: %s", error.message)
            message = f"{field} is set, but this target has no tokenizer that it can use"
            raise InvalidArgument.of("TOKENIZER_MISSING", field, message) from error
