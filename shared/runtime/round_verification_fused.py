"""`RoundVerification` on CUDA: from the target's last hidden states to the next round."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from shared.kernels.fused_triton import parts_of
from shared.kernels.launch import dependent_launch, empties
from shared.kernels.linear import LinearWeight, linear_partials
from shared.models.decoder import DecoderOutput
from shared.runtime.round_batches import RoundTree
from shared.runtime.round_commit_jit import accept_trees, gather_parts, move_path, store_rows
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import ACTIVE, ENDED, LENGTH, OPEN, TAIL, RoundState
from shared.runtime.round_verification import (
    RESULT_COUNTS,
    CommittedRound,
    RoundVerification,
)
from shared.speculation.draw_triton import fused_draw
from shared.speculation.tree import TreeRows

_MOVED_ELEMENTS = 1024
_STORED_ELEMENTS = 1024
_GATHERED_PARTS = 4


@dataclass(frozen=True, slots=True, eq=False)
class FusedRoundVerification(RoundVerification):
    """Acceptance, moves and features in a handful of launches.

    Attributes:
        projection_weight: the features' projection, prepared for few rows.
    """

    projection_weight: LinearWeight | None = field(init=False)

    def __post_init__(self) -> None:
        projection, weight = None if self.features is None else self.features.projection, None
        if projection is not None:
            weight = LinearWeight.prepare(projection.to(self.decoder.dtype))
        object.__setattr__(self, "projection_weight", weight)

    def draw(
        self, logits: Tensor, state: RoundState, tree: TreeRows, sampling: RoundSampling
    ) -> Tensor:
        """See `RoundVerification.draw`."""
        if sampling is RoundSampling.GREEDY:
            return fused_draw(logits, None, tree.depths.flatten()).view(tree.depths.shape)
        return sampling.draw(logits, state, tree.depths)

    def finish(
        self, state: RoundState, tree: RoundTree, output: DecoderOutput, drawn: Tensor
    ) -> CommittedRound:
        """See `RoundVerification.finish`."""
        num_slots, width = state.num_slots, self.shape.max_committed
        num_rows, device = self.shape.num_tree_rows, drawn.device
        rows, sources, targets = empties(3, (num_slots * width,), torch.int64, device)
        result = torch.empty((num_slots, RESULT_COUNTS + width), dtype=torch.int64, device=device)
        accept_trees[(num_slots,)](
            drawn, tree.rows.token_ids, tree.rows.parents, tree.rows.visible, tree.batch.slots,
            state.numbers, result, rows, sources, targets, state.numbers.stride(0),
            NUM_ROWS=num_rows, WIDTH=width, RESULT_COUNTS=RESULT_COUNTS,
            LENGTH=LENGTH, OPEN=OPEN, ACTIVE=ACTIVE, ENDED=ENDED, TAIL=TAIL,
            BLOCK_ROWS=triton.next_power_of_2(num_rows),
            BLOCK_WIDTH=triton.next_power_of_2(width), num_warps=4,
            **dependent_launch(device, num_slots),
        )  # fmt: skip
        self._move(num_slots, width, sources, targets)
        self._store_features(output, rows, targets)
        return CommittedRound(result, rows.view(num_slots, width))

    def _logits(self, hidden: Tensor) -> Tensor:
        # Kernels widen the logits as they read them.
        return self.decoder.logits(hidden, self.decoder.dtype)

    def _move(self, num_slots: int, width: int, sources: Tensor, targets: Tensor) -> None:
        storage = self.pool.storage.flatten(0, 1)
        if self.pool.layout.is_e4m3:
            storage = storage.view(torch.uint8)
        token_size = storage[0, 0].numel()
        block = min(_MOVED_ELEMENTS, triton.next_power_of_2(token_size))
        move_path[(num_slots, len(storage), triton.cdiv(token_size, block))](
            storage, sources, targets, storage.stride(0), WIDTH=width, TOKEN_SIZE=token_size,
            BLOCK_WIDTH=triton.next_power_of_2(width), BLOCK_SIZE=block, num_warps=4,
            **dependent_launch(storage.device, len(sources)),
        )  # fmt: skip

    def _join(self, parts: list[Tensor], rows: Tensor) -> Tensor:
        size = parts[0].shape[1]
        joined = parts[0].new_empty((len(rows), len(parts) * size))
        assert all(part.is_contiguous() for part in parts)
        for start in range(0, len(parts), _GATHERED_PARTS):
            some = parts[start : start + _GATHERED_PARTS]
            padded = (*some, *some[:1] * (_GATHERED_PARTS - len(some)))
            gather_parts[(len(rows), len(some))](
                *padded, rows, joined, start,
                NUM_PARTS=len(parts), SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=4,
                **dependent_launch(joined.device, len(rows)),
            )  # fmt: skip
        return joined

    def _project(
        self, joined: Tensor, projection: Tensor | None, feature_rows: Tensor, slots: Tensor
    ) -> None:
        weight = self.projection_weight
        rows = joined if weight is None else linear_partials(joined, weight)
        source, num_parts = parts_of(rows)
        size = feature_rows.shape[1]
        assert feature_rows.is_contiguous()
        store_rows[(len(slots), triton.cdiv(size, _STORED_ELEMENTS))](
            source, joined, slots, feature_rows,
            NUM_PARTS=num_parts, SIZE=size, BLOCK=_STORED_ELEMENTS, num_warps=4,
            **dependent_launch(joined.device, len(slots)),
        )  # fmt: skip
