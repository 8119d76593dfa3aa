"""A tiny DFlash head with the oracle that recomputes its blocks from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.draft.drafters.dflash import DflashDrafter
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.heads.dflash import DflashHead, load_dflash
from shared.models.heads.target_tensors import TargetFolder
from shared.tokens import TreeShape
from tests.helpers.checkpoints import TinyShape, build_model, write_checkpoint
from tests.helpers.dflash_heads import DflashOracle, TinyDflash, write_dflash
from tests.helpers.drafting import VOCAB_SIZE, committed, prefix_features

PAGE_SIZE = 4
BLOCK_SIZE = 5
CPU = torch.device("cpu")
TARGET_SHAPE = TinyShape(vocab_size=VOCAB_SIZE, num_layers=6)
CHAIN = TreeShape(BLOCK_SIZE - 1, 1, BLOCK_SIZE)
TREE = TreeShape(BLOCK_SIZE - 1, 4, 24)


@dataclass(frozen=True)
class BlockSetup:
    """One head, its oracle, and a target whose features are a function of the tokens before."""

    head: DflashHead
    oracle: DflashOracle

    def drafter(
        self, *, num_pages: int = 100, window: int = 120, block_size: int = BLOCK_SIZE
    ) -> DflashDrafter:
        pool = KvPool(self.head.kv_layout(PAGE_SIZE), num_pages, CPU)
        return DflashDrafter(
            self.head,
            pool,
            KvLeases(num_pages, PAGE_SIZE, prefix_cache=False),
            block_size=block_size,
            window_tokens=window,
        )

    def features(self, token_ids: Sequence[int]) -> Tensor:
        """Returns `[N, K * H]`, see `prefix_features`."""
        return prefix_features(token_ids, 96)

    def sent(self, sequence: DraftSequence, start: int, end: int) -> FeatureRows:
        """Returns the features that the target sends of positions `[start, end)`."""
        projection = self.head.feature_spec.projection
        assert projection is not None
        return FeatureRows(start, self.features(sequence.token_ids[:end])[start:] @ projection.T)

    def open(self, drafter: DflashDrafter, sequence: DraftSequence) -> None:
        """Opens a sequence with the features of every position but the last."""
        drafter.open(sequence)
        drafter.add_features(sequence, self.sent(sequence, 0, sequence.num_tokens - 1))

    def commit(
        self, drafter: DflashDrafter, sequence: DraftSequence, tokens: Sequence[int], *nodes: int
    ) -> None:
        """Commits tokens with their features; see `committed`."""
        start = sequence.num_tokens - 1
        verdict = committed(sequence, tokens, *nodes)
        drafter.commit(sequence, verdict, self.sent(sequence, start, sequence.num_tokens - 1))


def block_setup(folder: Path) -> BlockSetup:
    """Writes a target and its head to `folder` and loads the head."""
    target = write_checkpoint(folder / "target", shape=TARGET_SHAPE)
    tiny = TinyDflash(block_size=BLOCK_SIZE)
    head = load_dflash(
        write_dflash(folder / "head", tiny),
        TargetFolder(target, dtype=torch.float32, device=CPU),
        dtype=torch.float32,
        device=CPU,
    )
    weights = build_model("llama", TARGET_SHAPE).state_dict()
    oracle = DflashOracle(
        tiny,
        target_embedding=weights["model.embed_tokens.weight"],
        target_lm_head=weights["lm_head.weight"],
    )
    return BlockSetup(head, oracle)
