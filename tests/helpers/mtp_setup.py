"""Tiny next-token layers with an oracle that recomputes their drafts from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.multi_layer import MultiLayerDrafter
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.heads.head import DraftHead
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.runtime.tree_model import HeadModel
from tests.helpers.drafting import committed, plain_grower, prefix_features
from tests.helpers.mtp_heads import MtpOracle, TinyMtp, write_mtp

PAGE_SIZE = 4
CPU = torch.device("cpu")
MTPS = {
    "deepseek 1": TinyMtp(),
    "mimo 1": TinyMtp("mimo"),
    "deepseek 2": TinyMtp(num_layers=2),
    "deepseek 3": TinyMtp(num_layers=3),
    "mimo 3": TinyMtp("mimo", num_layers=3),
}


@dataclass(frozen=True)
class MtpSetup:
    """One head, its oracle, and a target whose features are a function of the tokens before."""

    head: DraftHead
    oracle: MtpOracle

    def drafter(
        self,
        *,
        num_pages: int = 200,
        context: int = 128,
        keeps_features: bool = False,
    ) -> EagleDrafter:
        has_one_layer = len(self.head.layers) == 1
        kind = EagleDrafter if has_one_layer else MultiLayerDrafter
        pool = KvPool(self.head.kv_layout(PAGE_SIZE), num_pages, CPU)
        return kind(
            HeadModel(self.head, pool),
            KvLeases(num_pages, PAGE_SIZE, prefix_cache=has_one_layer),
            max_context_tokens=context,
            keeps_features=keeps_features,
            grower=plain_grower(HeadModel(self.head, pool), context) if has_one_layer else None,
        )

    def features(self, token_ids: Sequence[int]) -> Tensor:
        """Returns `[N, H]`, see `prefix_features`."""
        return prefix_features(token_ids, 32)

    def sent(self, sequence: DraftSequence, start: int, end: int) -> FeatureRows:
        """Returns the features that the target sends of positions `[start, end)`."""
        return FeatureRows(start, self.features(sequence.token_ids[:end])[start:])

    def open(self, drafter: EagleDrafter, sequence: DraftSequence) -> None:
        """Opens a sequence with the features of every position but the last."""
        drafter.open(sequence)
        drafter.add_features(sequence, self.sent(sequence, 0, sequence.num_tokens - 1))

    def commit(
        self, drafter: EagleDrafter, sequence: DraftSequence, tokens: Sequence[int], *nodes: int
    ) -> None:
        """Commits tokens with their features; see `committed`."""
        start = sequence.num_tokens - 1
        verdict = committed(sequence, tokens, *nodes)
        drafter.commit(sequence, verdict, self.sent(sequence, start, sequence.num_tokens - 1))


def mtp_setup(folder: Path, mtp: TinyMtp) -> MtpSetup:
    """Writes a target with next-token layers to `folder` and loads the layers."""
    write_mtp(folder, mtp)
    target = TargetFolder(folder, dtype=torch.float32, device=CPU)
    head = load_mtp(folder, target, dtype=torch.float32, device=CPU)
    return MtpSetup(head, MtpOracle(mtp, folder))
