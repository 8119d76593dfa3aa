"""A `RoundRunner` over its own pages, whose trees are recorded."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.heads.config import HeadKind
from shared.models.heads.dflash import DflashHead, load_dflash
from shared.models.heads.head import DraftHead
from shared.models.heads.loader import load_head
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from shared.runtime.round_batches import RoundBatches, RoundTree
from shared.runtime.round_graphs import RoundGraphs
from shared.runtime.round_head import OwnHead
from shared.runtime.round_runner import RoundRunner
from shared.runtime.round_state import NewLane, RoundSampling
from shared.runtime.round_verification import RoundVerification, VerifiedTrees
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_draft import BlockDraft, LayeredDraft, RoundDraft
from shared.runtime.tree_model import BlockModel, HeadModel, LayeredModel, RoundModel
from shared.speculation.tree import TreeRows
from shared.tokens import SamplingParams, TokenTree, TreeShape
from tests.helpers.dflash_heads import TinyDflash, write_dflash
from tests.helpers.draft_heads import TinyHead, write_head
from tests.helpers.mtp_heads import TinyMtp, write_mtp
from tests.helpers.poisoned import POISON, poison_padding

NUM_PAGES = 120
MAX_CONTEXT = 128


@dataclass(frozen=True)
class Pair:
    """A target and its head."""

    decoder: Decoder
    head: DraftHead | DflashHead


def record_num_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which each round adds the number of slots it computes."""
    sizes: list[int] = []
    grow = RoundGraphs.grow

    def grow_recorded(graphs: RoundGraphs, num_slots: int, sampling: RoundSampling) -> None:
        sizes.append(graphs.num_computed(num_slots))
        grow(graphs, num_slots, sampling)

    monkeypatch.setattr(RoundGraphs, "grow", grow_recorded)
    return sizes


def load_pair(target: Path, folder: Path, head: TinyHead, device: torch.device) -> Pair:
    """Writes the head to `folder` and loads both, in float32."""
    return Pair(
        load_decoder(target, dtype=torch.float32, device=device),
        load_head(
            write_head(folder, head),
            HeadKind(head.kind),
            TargetFolder(target, dtype=torch.float32, device=device),
            dtype=torch.float32,
            device=device,
        ),
    )


def load_block_pair(target: Path, folder: Path, head: TinyDflash, device: torch.device) -> Pair:
    """Does the same as `load_pair` for a head that drafts blocks."""
    tensors = TargetFolder(target, dtype=torch.float32, device=device)
    written = write_dflash(folder, head)
    return Pair(
        load_decoder(target, dtype=torch.float32, device=device),
        load_dflash(written, tensors, dtype=torch.float32, device=device),
    )


def load_mtp_pair(folder: Path, mtp: TinyMtp, device: torch.device) -> Pair:
    """Does the same as `load_pair` for a target with its own next-token layers."""
    write_mtp(folder, mtp)
    tensors = TargetFolder(folder, dtype=torch.float32, device=device)
    return Pair(
        load_decoder(folder, dtype=torch.float32, device=device),
        load_mtp(folder, tensors, dtype=torch.float32, device=device),
    )


class _PlainLayers(LayeredModel):
    """Drafts in plain torch on any device, as the host does."""

    def code(self, batches: RoundBatches, source_rows: Tensor | None) -> LayeredDraft:
        assert source_rows is not None
        return LayeredDraft(self.head, self.pool, batches, source_rows)


class _PlainBlocks(BlockModel):
    """Drafts in plain torch on any device, as the host does."""

    def code(self, batches: RoundBatches, source_rows: Tensor | None) -> BlockDraft:
        assert source_rows is not None
        return BlockDraft(self.head, self.pool, batches, source_rows)


def _model(head: DraftHead | DflashHead, pool: KvPool, *, is_plain: bool) -> RoundModel:
    if isinstance(head, DflashHead):
        size = head.config.block_size
        return (_PlainBlocks if is_plain else BlockModel)(head, pool, size)
    if len(head.layers) > 1:
        return (_PlainLayers if is_plain else LayeredModel)(head, pool)
    return (_PlainHead if is_plain else HeadModel)(head, pool)


class _PlainHead(HeadModel):
    """Drafts in plain torch on any device, as the host does."""

    def code(self, batches: RoundBatches, source_rows: Tensor | None) -> RoundDraft:
        assert source_rows is not None
        return RoundDraft(self.head, self.pool, batches, source_rows)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedVerification(RoundVerification):
    """Verifies trees and records them."""

    recorded: list[TreeRows]

    def forward(self, tree: RoundTree) -> VerifiedTrees:
        self.recorded.append(tree.rows)
        return RoundVerification.forward(self, tree)


class DeviceRounds:
    """Places sequences in pages in random order and adds pages as rounds need them. The padding
    page is poisoned.

    Attributes:
        trees: the trees of every round so far, if recorded; recording needs the plain torch parts.
    """

    def __init__(
        self,
        pair: Pair,
        shape: TreeShape,
        page_size: int,
        *,
        max_sequences: int = 8,
        other_shapes: Sequence[TreeShape] = (),
        is_recorded: bool = True,
    ) -> None:
        device, self._pair = pair.decoder.device, pair
        self._pool = KvPool(pair.decoder.kv_layout(page_size), NUM_PAGES, device)
        head_pool = KvPool(pair.head.kv_layout(page_size), NUM_PAGES, device)
        spec = pair.head.feature_spec
        self._rows = torch.zeros((NUM_PAGES * page_size, spec.width), device=device)
        for pool in (self._pool, head_pool):
            poison_padding(pool)
        self._rows[:page_size] = POISON
        self._free = [
            random.Random(seed).sample(range(1, NUM_PAGES), NUM_PAGES - 1) for seed in (3, 4)
        ]
        self._pages: dict[int, tuple[list[int], list[int]]] = {}
        self.trees: list[TreeRows] = []
        self.runner = RoundRunner(
            decoder=pair.decoder,
            pool=self._pool,
            head=OwnHead(
                _model(pair.head, head_pool, is_plain=is_recorded),
                self._recorded() if is_recorded else None,
            ),
            feature_rows=self._rows,
            shapes=dict.fromkeys((shape, *other_shapes), max_sequences),
            max_context_tokens=MAX_CONTEXT,
        )

    def add(
        self,
        sequence_id: int,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        num_head_rows: int = 0,
    ) -> None:
        """Computes all tokens but the last in a normal forward pass, and places the sequence."""
        self.runner.place(
            [self.new_lane(sequence_id, token_ids, sampling, num_head_rows=num_head_rows)]
        )

    def new_lane(
        self,
        sequence_id: int,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        num_head_rows: int = 0,
        num_computed: int | None = None,
    ) -> NewLane:
        """Computes the first `num_computed` tokens, by default all but the last, and returns the
        lane to place."""
        pages = self._pages.setdefault(sequence_id, ([], []))
        self._grow(pages[0], self._free[0], len(token_ids))
        self._grow(pages[1], self._free[1], len(token_ids))
        self._compute(token_ids[: -1 if num_computed is None else num_computed], pages[0])
        return NewLane(sequence_id, token_ids, sampling, *pages, num_head_rows, num_computed)

    def remove(self, sequence_id: int) -> None:
        """Removes a sequence from the runner; it keeps its pages."""
        self.runner.remove([sequence_id])

    def launch(self) -> None:
        """Adds the pages that a round needs and launches it."""
        for sequence_id in self.runner.sequence_ids:
            page_lists = self._pages[sequence_id]
            for pages, free, count in zip(
                page_lists, self._free, self.runner.num_kv_tokens(sequence_id), strict=True
            ):
                self._grow(pages, free, count)
            self.runner.set_pages(sequence_id, *page_lists)
        self.runner.launch()

    def _recorded(self) -> Callable[..., RoundVerification]:
        return functools.partial(RecordedVerification, recorded=self.trees)

    def _grow(self, pages: list[int], free: list[int], num_tokens: int) -> None:
        while len(pages) * self._pool.page_size < num_tokens:
            pages.append(free.pop())

    def _compute(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        rows = SequenceRows.causal(token_ids, 0, pages, (0,))
        spec, decoder = self._pair.head.feature_spec, self._pair.decoder
        layers = tuple(i for i in spec.layer_indices if i <= len(decoder.layers))
        device = decoder.device
        batch = build_batch([rows], page_size=self._pool.page_size, device=device)
        output = ModelRunner(decoder, self._pool).run(batch, capture_layers=layers)
        features = torch.cat(output.features or (output.hidden,), dim=-1)
        if spec.projection is not None:
            features = features @ spec.projection.T
        self._rows.index_copy_(0, batch.slots, features)


def token_tree(tree: TreeRows, row: int) -> TokenTree:
    """Returns one tree of a batch; its last nodes may be missing."""
    tokens = tree.token_ids[row, 1:].tolist()
    kept = [node for node, token in enumerate(tokens) if token >= 0]
    number: dict[int, int | None] = {0: None}
    number.update({node + 1: place for place, node in enumerate(kept)})
    parents = tree.parents[row].tolist()
    return TokenTree(
        tuple(tokens[node] for node in kept), tuple(number[parents[node + 1]] for node in kept)
    )
