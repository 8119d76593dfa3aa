"""Speculative rounds of one sequence run by the host: the oracle for rounds on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.draft.drafters.dflash import DflashDrafter
from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.multi_layer import MultiLayerDrafter
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.heads.dflash import DflashHead
from shared.models.heads.head import DraftHead
from shared.runtime.runner import ModelRunner, RunnerOutput
from shared.runtime.tree_model import HeadModel
from shared.speculation.row_sampling import row_sampling
from shared.speculation.tree import row_parents
from shared.speculation.verify import AcceptedPath, accept_path, draw_tokens
from shared.tokens import EMPTY_TREE, Outcome, SamplingParams, TokenTree, TreeShape, Verdict
from tests.helpers.drafting import plain_grower

NUM_PAGES = 80


@dataclass(frozen=True)
class HostRound:
    """One round: the drafted tree, the accepted nodes and the committed tokens."""

    tree: TokenTree
    accepted: tuple[int, ...]
    token_ids: tuple[int, ...]


def _drafter(head: DraftHead | DflashHead, pool: KvPool) -> EagleDrafter | DflashDrafter:
    if isinstance(head, DflashHead):
        return DflashDrafter(
            head,
            pool,
            KvLeases(NUM_PAGES, pool.page_size, prefix_cache=False),
            block_size=head.config.block_size,
            window_tokens=head.config.layers.max_position_embeddings,
        )
    has_layers = len(head.layers) > 1
    return (MultiLayerDrafter if has_layers else EagleDrafter)(
        HeadModel(head, pool),
        KvLeases(NUM_PAGES, pool.page_size, prefix_cache=not has_layers),
        max_context_tokens=head.config.max_position_embeddings,
        keeps_features=False,
        grower=None
        if has_layers
        else plain_grower(HeadModel(head, pool), head.config.max_position_embeddings),
    )


class HostRounds:
    """One sequence with its own KV pools."""

    def __init__(
        self,
        decoder: Decoder,
        head: DraftHead | DflashHead,
        prompt: Sequence[int],
        sampling: SamplingParams,
        page_size: int,
    ) -> None:
        self._pool = KvPool(decoder.kv_layout(page_size), NUM_PAGES, decoder.device)
        self._runner = ModelRunner(decoder, self._pool)
        self._spec = head.feature_spec
        self._pages = range(1, NUM_PAGES)
        head_pool = KvPool(head.kv_layout(page_size), NUM_PAGES, head.device)
        self._drafter = _drafter(head, head_pool)
        self.sampling = sampling
        self.sequence = DraftSequence(
            SequenceKey(1, 1), list(prompt), len(prompt), sampling, 0, True, 10**6, 256
        )
        self._drafter.open(self.sequence)
        self.start = self._decide(0, EMPTY_TREE)
        """The round of the prompt, without a tree."""

    def round(self, shape: TreeShape) -> HostRound:
        """Drafts, verifies and commits."""
        assert self._drafter.reserve(self.sequence, shape)
        [proposal] = self._drafter.propose([self.sequence], shape)
        return self._decide(self.sequence.num_tokens - 1, proposal.tree)

    def _decide(self, start: int, tree: TokenTree) -> HostRound:
        sequence = self.sequence
        root = sequence.num_tokens - 1
        num_rows = root - start + 1
        output = self._forward(start, num_rows, tree)
        positions = torch.tensor([root + 1 + depth for depth in (0, *tree.depths)])
        rows = row_sampling([self.sampling], [1 + len(tree)], device=self._pool.device)
        logits = output.logits
        drawn = draw_tokens(logits, rows, positions.to(logits.device)).tolist()
        path = accept_path(tree, drawn)
        committed = path.token_ids(tree)
        self._take_in(start, num_rows, path, output, committed)
        return HostRound(tree, path.node_indices, committed)

    def _forward(self, start: int, num_rows: int, tree: TokenTree) -> RunnerOutput:
        tokens, root = self.sequence.token_ids, self.sequence.num_tokens - 1
        positions = tuple(root + depth for depth in (0, *tree.depths))
        rows = SequenceRows(
            token_ids=[*tokens[start:], *tree.token_ids],
            positions=[*range(start, root), *positions],
            kv_start=start,
            pages=self._pages,
            prefix_length=start,
            tail_mask=tail_mask(tree) if len(tree) else None,
            logit_rows=range(num_rows - 1, num_rows + len(tree)),
        )
        page_size, device = self._pool.page_size, self._pool.device
        batch = build_batch([rows], page_size=page_size, device=device)
        layers = tuple(i for i in self._spec.layer_indices if i <= len(self._runner.decoder.layers))
        return self._runner.run(batch, capture_layers=layers)

    def _take_in(
        self,
        start: int,
        num_rows: int,
        path: AcceptedPath,
        output: RunnerOutput,
        committed: Sequence[int],
    ) -> None:
        kept = [*range(num_rows), *(num_rows + node for node in path.node_indices)]
        device = self._pool.device
        sources = [self._slot(start + row) for row in kept]
        targets = [self._slot(start + place) for place in range(len(kept))]
        self._pool.move(torch.tensor(sources, device=device), torch.tensor(targets, device=device))
        self.sequence.token_ids.extend(committed)
        verdict = Verdict(
            1, 0, Outcome.VERIFIED, path.node_indices, tuple(committed), self.sequence.num_tokens
        )
        rows = self._features(output).index_select(0, torch.tensor(kept, device=device))
        self._drafter.commit(self.sequence, verdict, FeatureRows(start, rows))

    def _features(self, output: RunnerOutput) -> Tensor:
        parts = list(output.features) or [output.hidden]
        joined, projection = torch.cat(parts, dim=-1), self._spec.projection
        return joined if projection is None else F.linear(joined, projection)

    def _slot(self, index: int) -> int:
        page_size = self._pool.page_size
        return self._pages[index // page_size] * page_size + index % page_size


def tail_mask(tree: TokenTree) -> tuple[tuple[bool, ...], ...]:
    """Returns the rows that each row attends to: the root, its ancestors and itself.

    Square, and lower triangular because parents come first; it is `SequenceRows.tail_mask` of a
    tree whose prefix ends before the root.
    """
    parents = row_parents(tree)
    mask: list[list[bool]] = []
    for row, parent in enumerate(parents):
        seen = [False] * len(parents) if parent is None else list(mask[parent])
        seen[row] = True
        mask.append(seen)
    return tuple(tuple(seen) for seen in mask)
