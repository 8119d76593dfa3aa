"""The learner process: loads student and traffic, links to targets, swaps weights into drafts."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from grpc import aio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from torch.nn import functional as F

from services.draft.algorithm import Algorithm
from services.draft.attach_client import AttachClient, Backoff
from services.draft.drafters.model_factory import head_config, read_head
from services.draft.drafters.table_service import BorrowedTables
from services.draft.events import WorkerIdentity
from services.draft.learner.learner import Learner
from services.draft.learner.settings import LearnerSettings
from services.draft.learner.student import HeadStudent, ModelStudent, Student
from services.draft.learner.traffic import Example, Traffic
from services.draft.metrics import families
from services.draft.training.documents import Documents
from services.draft.training.frozen_target import FrozenTarget
from shared.errors import CheckpointError
from shared.hub import shown_name
from shared.kernels.linear import LinearWeight
from shared.layers.linear import Linear
from shared.model_files import tokenizer_sha256
from shared.models.config import ModelConfig
from shared.models.heads.feature_spec import FeatureSpec
from shared.models.heads.target_tensors import BorrowedTensors, TargetFolder
from shared.pb.outrider.admin.v1 import admin_service_pb2 as pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as pb_grpc
from shared.rpc.channel import open_channel
from shared.rpc.status import error_from_rpc
from shared.runtime.device import device_named, dtype_named
from shared.vocabulary_map import read_vocabulary_map

_PREFIX = "outrider_learner"
_PUBLISH_TIMEOUT_S = 120.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _TargetTables:
    """See `TargetTables`."""

    embedding: torch.Tensor
    lm_head: torch.Tensor

    @property
    def head(self) -> Linear:
        """The lm_head as a layer on the same memory, not packed as products would prefer."""
        return Linear(LinearWeight(self.lm_head, is_packed=False), None)


class LearnerProcess:
    """A `Learner` with its traffic, its links to targets and its connections to drafts.

    Raises:
        CheckpointError: head or target cannot be loaded, or recorded traffic cannot be read.
        SettingsError: there is no such device.

    Attributes:
        traffic: recorded examples.
        learner: trains the draft.
    """

    def __init__(self, settings: LearnerSettings) -> None:
        self._settings = settings
        self._spec, tables, tensors = _target_features(settings)
        self._borrowed = BorrowedTensors(tensors, tables.embedding, tables.head)
        student = _student(settings, tables, tensors.config.num_layers)
        self.traffic = Traffic(
            max_tokens=settings.retain_tokens,
            max_age_s=settings.retain_s,
            held_out_share=settings.held_out_share,
            replay_share=settings.replay_share,
        )
        self.learner = Learner(student, self.traffic, settings, self._publish)
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        for example in _recorded(settings, settings.traffic, student):
            self.traffic.add(example)
        for example in _recorded(settings, settings.replay, student):
            self.traffic.add(example, is_old=True)

    async def run(self, stop: asyncio.Event) -> None:
        """Learns until `stop`, or until `--max-lessons` are done.

        Raises:
            OutriderError: a draft refuses the initial weights, or cannot be reached.
        """
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self.learner.begin)
        clients = [self._client(address) for address in self._settings.target]
        links = [asyncio.create_task(client.run()) for client in clients]
        lessons = asyncio.create_task(
            asyncio.to_thread(self.learner.run, self._stop, max_lessons=self._settings.max_lessons)
        )
        waiting = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([lessons, waiting], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop.set()
            await lessons
            waiting.cancel()
            for client in clients:
                client.detach()
            await asyncio.gather(*links, return_exceptions=True)
            if self._settings.record is not None:
                texts = [example.token_ids for example in self.traffic.kept()]
                Documents.of(texts).save(self._settings.record)

    def metrics(self) -> LearnerMetrics:
        """Returns the metrics of the process; register them once."""
        return LearnerMetrics(self.learner, self.traffic)

    def _client(self, address: str) -> AttachClient:
        settings = self._settings
        identity = WorkerIdentity(
            worker_id=f"learner-{socket.gethostname()}-{os.getpid()}",
            model_id=shown_name(settings.model_folder),
            algorithm=settings.speculative_algorithm.value,
            tokenizer_sha256=tokenizer_sha256(settings.target_folder),
            max_sequences=1,
            max_context_tokens=settings.window,
            feature_spec=self._spec,
            learns=True,
        )
        tables = BorrowedTables(self._borrowed, self.learner.between_updates)
        return AttachClient(
            *(address, identity, self.traffic, Backoff()),
            tls=settings.target_tls,
            reload_tables=tables.reload,
        )

    def _publish(self, folder: Path, version: int) -> None:
        """See `Publish`. Called on the learner's thread."""
        assert self._loop is not None
        request = pb.UpdateDraftWeightsRequest(
            model_path=str(folder.resolve()), weight_version=str(version)
        )
        asyncio.run_coroutine_threadsafe(self._swap(request), self._loop).result()

    async def _swap(self, request: pb.UpdateDraftWeightsRequest) -> None:
        for address in self._settings.publish_to:
            try:
                async with open_channel(address, self._settings.target_tls) as channel:
                    stub = pb_grpc.AdminServiceStub(channel)
                    response = await stub.UpdateDraftWeights(request, timeout=_PUBLISH_TIMEOUT_S)
            except aio.AioRpcError as failure:
                raise error_from_rpc(failure) from failure
            pause_s = response.pause_duration.ToNanoseconds() / 1e9
            version, pause_ms = request.weight_version, pause_s * 1e3
            log.info("%s has version %s; rounds waited %.1f ms", address, version, pause_ms)


@dataclass(frozen=True, slots=True)
class LearnerMetrics(Collector):
    """`LearnerFigures`, and those of the traffic."""

    learner: Learner
    traffic: Traffic

    def collect(self) -> Iterator[Metric]:
        traffic = self.traffic
        yield from families(_PREFIX, self.learner.figures)
        for family, name, meaning, value in (
            (GaugeMetricFamily, "attached_target_count", "Targets learnt from", traffic.num_links),
            (GaugeMetricFamily, "kept_tokens", "Tokens in memory", traffic.num_kept_tokens),
            (CounterMetricFamily, "examples", "Sequences that came", traffic.num_examples),
            (CounterMetricFamily, "tokens", "Tokens that came", traffic.num_tokens),
        ):
            yield family(f"{_PREFIX}_{name}", meaning, value=value)


def _student(settings: LearnerSettings, tables: _TargetTables, num_target_layers: int) -> Student:
    folder = settings.model_folder
    if settings.speculative_algorithm is Algorithm.STANDALONE:
        if read_vocabulary_map(folder, settings.target_folder) is not None:
            raise CheckpointError(
                f"{folder} has another tokenizer than {settings.target_folder}; a draft is taught "
                f"by its target's distributions, which are over the target's tokens"
            )
        return ModelStudent(folder, tables, settings, num_target_layers=num_target_layers)
    return HeadStudent(folder, tables, settings)


def _target_features(settings: LearnerSettings) -> tuple[FeatureSpec, _TargetTables, TargetFolder]:
    """Returns the features to request from the target, its tables, and their reader. A head is
    loaded as drafts load it, so that its projection is the same bit for bit."""
    folder, algorithm = settings.model_folder, settings.speculative_algorithm
    target = ModelConfig.from_folder(settings.target_folder)
    device = device_named(settings.device)
    is_model = algorithm is Algorithm.STANDALONE
    saved = target if is_model else head_config(algorithm, folder, target)
    dtype = dtype_named(settings.dtype, saved.dtype, device)
    tensors = TargetFolder(settings.target_folder, dtype=dtype, device=device)
    if is_model:
        spec = FeatureSpec((target.num_layers + 1,), dtype, target.hidden_size)
        return spec, _TargetTables(tensors.embedding(), tensors.lm_head()), tensors
    head = read_head(algorithm, folder, tensors, dtype=dtype, device=device)
    return head.feature_spec, _TargetTables(head.embedding, tensors.lm_head()), tensors


def _recorded(
    settings: LearnerSettings, archives: Sequence[Path], student: Student
) -> Iterator[Example]:
    """Yields the texts of archives as examples, with features that the target computes here."""
    if not archives:
        return
    device = device_named(settings.device)
    target = FrozenTarget.load(settings.target_folder, device=device, dtype=torch.float32)
    layers, projection = student.feature_layers, student.projection
    for text in (text for path in archives for text in Documents.load(path).rows()):
        for start in range(0, len(text), settings.window):
            window = text[start : start + settings.window]
            with torch.no_grad():
                features = target.read(torch.tensor([window], device=device), layers).features[0]
                rows = features if projection is None else F.linear(features, projection)
            yield Example(tuple(window), rows[:-1].cpu(), 0, math.inf)
