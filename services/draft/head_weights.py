"""Swaps a serving draft's weights: loads them beside the old ones, copies them between rounds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from services.draft.algorithm import Algorithm
from services.draft.drafters.drafter import Drafter
from services.draft.engine import DraftEngine
from services.draft.settings import DraftSettings
from shared.errors import CheckpointError, FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from shared.models.decoder import Decoder
    from shared.models.heads.head import DraftHead

SWAPPABLE = (Algorithm.EAGLE, Algorithm.EAGLE3, Algorithm.MTP, Algorithm.STANDALONE)
log = logging.getLogger(__name__)


class HeadWeights:
    """Swaps the weights of a drafter. Called from any thread.

    Args:
        on_target: runs a function between two steps of the target in this process, which may use
            the head in its rounds; None where there is no such target.

    Attributes:
        version: version of the current weights, given by their sender; empty until a swap.
        num_swaps: number of swaps since the start.
    """

    def __init__(
        self,
        settings: DraftSettings,
        drafter: Drafter,
        engine: DraftEngine,
        on_target: Callable[[Callable[[], None]], Future[None]] | None = None,
    ) -> None:
        self.version = ""
        self.num_swaps = 0
        self._settings, self._drafter, self._engine = settings, drafter, engine
        self._on_target = on_target
        self._one_at_a_time = threading.Lock()

    def take(self, folder: Path, version: str) -> float:
        """Loads a folder as `--speculative-draft-model-path` does and swaps its weights in. Blocks.

        Returns:
            How long rounds waited, in seconds.

        Raises:
            FailedPrecondition: the drafter's weights cannot be swapped, or are sharded.
            InvalidArgument: the folder's weights are refused; the old weights stay.
            EngineFailed: the engine has died.
        """
        with self._one_at_a_time:
            try:
                apply = self._read(folder)
            except CheckpointError as error:
                raise InvalidArgument.of("WEIGHTS_REFUSED", "model_path", error.message) from error
            pause_s = self._engine.between_rounds(lambda: self._swap(apply)).result()
            self.version, self.num_swaps = version, self.num_swaps + 1
        log.info("weights of %s, version %r, within %.1f ms", folder, version, pause_s * 1e3)
        return pause_s

    def _read(self, folder: Path) -> Callable[[], None]:
        """Loads the weights of a folder; returns the function that copies them in."""
        algorithm = self._settings.algorithm
        if algorithm not in SWAPPABLE:
            swappable = ", ".join(swappable.value for swappable in SWAPPABLE)
            message = f"{algorithm.value} takes no other weights; {swappable} do"
            raise FailedPrecondition(message, reason="WEIGHTS_FIXED")
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder")
        # A worker without a model runs where torch is not installed.
        from shared.models.weight_update import WeightSwap

        is_model = algorithm is Algorithm.STANDALONE
        running, new = self._models(folder) if is_model else self._heads(folder)
        return WeightSwap(running, new).apply

    def _models(self, folder: Path) -> tuple[Decoder, Decoder]:
        """Returns the running draft model, and the folder's on the same device, so that the swap
        itself is a copy within the device."""
        from services.draft.drafter_factory import target_vocabulary
        from services.draft.drafters.model_factory import draft_options
        from services.draft.drafters.standalone import StandaloneDrafter
        from shared.models.loader import load_decoder
        from shared.models.weights import SERVING_PACE

        assert isinstance(self._drafter, StandaloneDrafter)
        running = self._drafter.decoder
        if running.group is not None:
            message = "a draft model that is cut over several processes takes no other weights"
            raise FailedPrecondition(message, reason="WEIGHTS_FIXED")
        dtype, device = running.dtype, running.device
        new = load_decoder(
            folder,
            dtype=dtype,
            device=device,
            options=draft_options(self._settings, running.config, dtype, device),
            pace=SERVING_PACE,
            vocabulary=target_vocabulary(self._settings),
            vocab_size=running.config.vocab_size,
        )
        return running, new

    def _heads(self, folder: Path) -> tuple[DraftHead, DraftHead]:
        """Returns the running head, and the folder's."""
        from services.draft.drafters.eagle import EagleDrafter
        from services.draft.drafters.model_factory import draft_options, read_head
        from shared.models.config import ModelConfig
        from shared.models.heads.target_tensors import Table, TargetTensors
        from shared.models.weights import SERVING_PACE

        assert isinstance(self._drafter, EagleDrafter)
        running, settings = self._drafter.head, self._settings
        dtype, device = running.dtype, running.device

        def table_of(table: Table) -> Tensor:
            """Takes the target's tensors from the running head, without reading them again."""
            is_head = table is Table.LM_HEAD
            return running.vocabulary.lm_head.dense() if is_head else running.embedding

        shared = TargetTensors(ModelConfig.from_folder(settings.target_folder), table_of)
        new = read_head(
            settings.algorithm,
            folder,
            shared,
            dtype=dtype,
            device=device,
            options=draft_options(settings, running.config, dtype, device),
            pace=SERVING_PACE,
        )
        if settings.algorithm is Algorithm.EAGLE:
            # With a token map, the running lm_head holds only the target's rows that it selects.
            mapped = running.vocabulary
            vocabulary = replace(new.vocabulary, token_ids=mapped.token_ids, lm_head=mapped.lm_head)
            new = replace(new, vocabulary=vocabulary)
        return running, new

    def _swap(self, apply: Callable[[], None]) -> float:
        """Runs on the engine's thread. Returns the time of `apply` without the step before it."""
        pause_s = 0.0

        def timed() -> None:
            nonlocal pause_s
            start_s = time.perf_counter()
            apply()
            pause_s = time.perf_counter() - start_s

        if self._on_target is None:
            timed()
        else:
            self._on_target(timed).result()
        # For later sequences, rows computed with the old weights would lower the acceptance.
        self._drafter.retire_prefix_cache()
        return pause_s
