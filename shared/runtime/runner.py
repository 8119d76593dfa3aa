"""Runs forwards of one decoder over one KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.kv.upload import uploaded_pairs
from shared.models.decoder import Decoder
from shared.runtime.graphs import CapturedForward, ForwardGraphs
from shared.runtime.lockstep import Leader
from shared.runtime.memory import CacheSize


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """Result of one forward of T rows, L of them with logits.

    Attributes:
        logits: `[L, V]` float32, in the order of `batch.logit_rows`.
        hidden: `[T, H]` after the final norm.
        features: one `[T, H]` for each captured layer.
    """

    logits: Tensor
    hidden: Tensor
    features: tuple[Tensor, ...]


class ModelRunner:
    """The boundary between scheduling and computing: everything above it deals in `ForwardBatch`.

    Args:
        graphs: CUDA graphs for the forwards that fit one; None runs every forward eagerly.
        leader: on rank 0 of a tensor parallel group, announces each forward to the other ranks.
        cache: cache settings that out-of-memory errors give advice on; None names no settings.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        graphs: ForwardGraphs | None = None,
        *,
        leader: Leader | None = None,
        cache: CacheSize | None = None,
    ) -> None:
        assert pool.layout == decoder.kv_layout(pool.page_size, pool.layout.dtype), (
            f"the pool's layout {pool.layout} does not fit the decoder"
        )
        self.decoder = decoder
        self.pool = pool
        self.device, self.page_size = pool.device, pool.page_size
        self._graphs = graphs
        self.leader = leader
        self.cache = cache or CacheSize(pool.storage.nbytes)

    @property
    def has_graphs(self) -> bool:
        """Whether weights and cache must keep their addresses, as CUDA graphs may hold them."""
        return self.device.type == "cuda" and self._graphs is not None

    @property
    def computes_aside(self) -> bool:
        """Whether the host is free once a step is launched. On a CPU, launching is computing."""
        return self.device.type != "cpu"

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, *, capture_layers: tuple[int, ...] = ()) -> RunnerOutput:
        """Computes `batch`, writes its keys and values, and returns logits of its logit rows.

        The next run may overwrite the tensors of the result.
        """
        if self.leader is not None:
            self.leader.forward(batch, capture_layers)
        with self.pool.advancing(batch) as plan:
            if self._graphs is not None and self._graphs.fits(batch, capture_layers, plan):
                captured = self._graphs.run(batch, capture_layers, plan)
                if captured is not None:
                    return self._result(captured, batch)
            states = None if plan is None else plan.upload(self.device)
            output = self.decoder.forward(
                batch, self.pool, capture_layers=capture_layers, states=states
            )
        return RunnerOutput(self._logits(output.hidden, batch), output.hidden, output.features)

    def _result(self, captured: CapturedForward, batch: ForwardBatch) -> RunnerOutput:
        num_rows, logits = len(batch.token_ids), captured.logits
        hidden = captured.hidden[:num_rows]
        return RunnerOutput(
            self._logits(hidden, batch) if logits is None else logits[: len(batch.logit_rows)],
            hidden,
            tuple(feature[:num_rows] for feature in captured.features),
        )

    def _logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        return self.decoder.logits(hidden.index_select(0, batch.logit_rows))

    @torch.inference_mode()
    def move(self, moves: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Moves keys and values between slots of the pool, all at once; see `KvPool.move`.

        Args:
            moves: source and target slots.

        Returns:
            The source slots and the target slots on the device, `[N]` int64 each.
        """
        if self.leader is not None:
            self.leader.move(moves)
        source_slots, target_slots = uploaded_pairs(moves, self.device)
        self.pool.move(source_slots, target_slots)
        return source_slots, target_slots

    def prepare_next(self) -> bool:
        """Captures one CUDA graph that a later forward would have to wait for; returns whether one
        was left to capture."""
        return self._graphs is not None and self._graphs.capture_next()
