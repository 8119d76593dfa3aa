"""Second part of a speculative round: the target verifies the trees and commits.

It writes the state that the next round starts from: lengths, open tokens, keys and values of the
accepted path in path order, and features of every committed position but the last.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder, DecoderOutput
from shared.models.heads.feature_spec import FeatureSpec
from shared.runtime.lane_states import LaneStates
from shared.runtime.round_batches import RoundShape, RoundTree
from shared.runtime.round_state import RoundSampling, RoundState
from shared.speculation.tree import AcceptedRows, TreeRows, accept_rows

RESULT_COUNTS = 2
"""Columns of a result before its tokens: the number of committed tokens, and of drafted nodes."""


@dataclass(frozen=True, slots=True)
class VerifiedTrees:
    """The output of the target's forward over the trees.

    Attributes:
        logits: `[S * T, V]` of any float type.
    """

    logits: Tensor
    output: DecoderOutput


@dataclass(frozen=True, slots=True)
class CommittedRound:
    """The tokens that a round committed.

    Attributes:
        result: `[S, 2 + W]` int64: counts of committed tokens and drafted nodes, then the tokens
            and zeros.
        rows: `[S, W]` int64, the forward's row that drew each committed token; undefined beyond.
    """

    result: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RoundVerification:
    """Verifies the trees of all slots of a state, in plain torch: a forward, a draw, a commit.

    Attributes:
        pool: the target's pool.
        features: the hidden states that the head reads; None without a head.
        feature_rows: `[num_slots, W]`, written for the committed rows.
        states: recurrent states of the lanes; None if the target has none.
    """

    decoder: Decoder
    pool: KvPool
    shape: RoundShape
    features: FeatureSpec | None
    feature_rows: Tensor | None
    states: LaneStates | None

    def forward(self, tree: RoundTree) -> VerifiedTrees:
        """Computes the rows of all trees."""
        layers, lanes = self._captured_layers, self.states
        most = self.shape.max_committed
        with nullcontext() if lanes is None else lanes.advancing(tree, most) as states:
            output = self.decoder.forward(
                tree.batch, self.pool, capture_layers=layers, states=states
            )
        return VerifiedTrees(self._logits(output.hidden), output)

    def draw(
        self, logits: Tensor, state: RoundState, tree: TreeRows, sampling: RoundSampling
    ) -> Tensor:
        """Draws the target's token after each row, `[S, T]` int64."""
        return sampling.draw(logits, state, tree.depths)

    def finish(
        self, state: RoundState, tree: RoundTree, output: DecoderOutput, drawn: Tensor
    ) -> CommittedRound:
        """Finds the accepted paths in the trees, keeps their rows and commits them to the state."""
        accepted = accept_rows(tree.rows, drawn, self.shape.tree.num_steps)
        rows = self._keep(tree.batch, output, accepted)
        result = _commit(state.narrowed(self.shape.max_committed), tree.rows, accepted)
        return CommittedRound(result, rows.view(len(result), -1))

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)

    @property
    def _captured_layers(self) -> tuple[int, ...]:
        """Layers that the forward must capture. It returns the final norm's output anyway."""
        if self.features is None:
            return ()
        num_layers = self.decoder.config.num_layers
        return tuple(i for i in self.features.layer_indices if i <= num_layers)

    def _keep(self, batch: ForwardBatch, output: DecoderOutput, accepted: AcceptedRows) -> Tensor:
        """Moves keys and values of the accepted paths into path order, and stores their features at
        the new slots. Returns the forward's row of each, `[S * W]` int64."""
        batch_size, num_rows = accepted.rows.shape
        first_rows = torch.arange(batch_size, device=accepted.rows.device).unsqueeze(1)
        first_rows = first_rows * self.shape.num_tree_rows
        sources = (first_rows + accepted.rows).flatten()
        steps = torch.arange(num_rows, device=sources.device)
        target_slots = batch.slots.index_select(0, (first_rows + steps).flatten())
        # Rows beyond the path stay where they are, and so do roots.
        self.pool.move(batch.slots.index_select(0, sources), target_slots)
        self._store_features(output, sources, target_slots)
        return sources

    def _store_features(self, output: DecoderOutput, rows: Tensor, slots: Tensor) -> None:
        """Stores the features of the forward's `rows` `[N]` at `slots` `[N]`."""
        if self.features is None or self.feature_rows is None:
            return
        captured = dict(zip(self._captured_layers, output.features, strict=True))
        parts = [captured.get(i, output.hidden) for i in self.features.layer_indices]
        self._project(self._join(parts, rows), self.features.projection, self.feature_rows, slots)

    def _join(self, parts: list[Tensor], rows: Tensor) -> Tensor:
        return torch.cat([part.index_select(0, rows) for part in parts], dim=-1)

    def _project(
        self, joined: Tensor, projection: Tensor | None, feature_rows: Tensor, slots: Tensor
    ) -> None:
        if projection is not None:
            joined = F.linear(joined, projection.to(joined.dtype))
        feature_rows.index_copy_(0, slots, joined.to(feature_rows.dtype))


def _commit(state: RoundState, tree: TreeRows, accepted: AcceptedRows) -> Tensor:
    """Writes the state that the next round starts from; slots without a sequence keep theirs."""
    num_committed = (accepted.counts + 1) * state.is_active
    is_active = state.is_active.bool()
    state.lengths.add_(num_committed)
    state.num_open.copy_(torch.where(is_active, num_committed, state.num_open))
    tokens = torch.where(is_active.unsqueeze(1), accepted.token_ids, state.open_tokens)
    state.open_tokens.copy_(tokens)
    last_rows = accepted.rows.gather(1, accepted.counts.unsqueeze(1)).squeeze(1)
    state.ended_rows.copy_(torch.where(is_active, last_rows, state.ended_rows))
    counts = torch.stack((num_committed, tree.num_nodes), dim=1)
    return torch.cat((counts, accepted.token_ids), dim=1)
