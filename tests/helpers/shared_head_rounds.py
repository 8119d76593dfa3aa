"""A draft that shares its head for rounds on the device, and never pushes a tree."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.target.drafts.attachment import Attachment, DraftIdentity, DraftMessage, DraftTimeout
from services.target.drafts.feature_store import FeatureSpec
from services.target.rounds.policy import LanePolicy, ShapeOrPlain
from services.target.rounds.round_shapes import RoundSource
from shared.kv.pool import KvPool
from shared.runtime.round_head import OwnHead
from shared.runtime.tree_model import HeadModel
from shared.tokens import TreeShape
from tests.helpers.checkpoints import DELTA, TinyShape, write_checkpoint
from tests.helpers.device_rounds import Pair, load_pair
from tests.helpers.draft_heads import TinyHead
from tests.helpers.engines import PAGE_SIZE, VOCAB_SIZE


def write_pair(
    target: Path, head: Path, device: torch.device, *, is_recurrent: bool = False
) -> Pair:
    """Writes a target with the vocabulary of small engines and an EAGLE-3 head; loads both.

    Args:
        is_recurrent: the target has layers with recurrent states.
    """
    overrides: dict[str, Any] = {}
    if is_recurrent:
        kinds = ["linear_attention", "full_attention", *["linear_attention"] * 2]
        overrides = DELTA | {"layer_types": kinds}
    shape = TinyShape(vocab_size=VOCAB_SIZE, num_layers=4, overrides=overrides)
    write_checkpoint(target, "qwen3_5" if is_recurrent else "llama", shape, seed=3)
    kind = TinyHead(kind="EAGLE3", vocab_size=VOCAB_SIZE, draft_vocab_size=20, has_embedding=False)
    return load_pair(target, head, kind, device)


@dataclass
class SilentDraft:
    """Counts the sequences that the target opens and closes."""

    opened: int = 0
    closed: int = 0

    def send(self, message: DraftMessage) -> bool:
        self.opened += len(message.opened)
        self.closed += len(message.closed)
        return True

    def close(self) -> None:
        pass


def sharing_head(
    pair: Pair,
    draft: SilentDraft,
    tree: TreeShape,
    other_trees: Mapping[TreeShape, int],
    *,
    num_pages: int = 150,
    max_context_tokens: int = 120,
    max_sequences: int = 8,
    is_pinned: bool = False,
) -> Attachment:
    """Returns an attachment whose head has its own pages, in random order.

    Args:
        num_pages: pages that the draft lends to the target.
    """
    spec, head = pair.head.feature_spec, pair.head
    pages = random.Random(5).sample(range(1, num_pages + 50), num_pages)
    return Attachment(
        DraftIdentity("embedded", "w", "m", "EAGLE3", 64, 0.0, tree),
        draft,
        DraftTimeout(0.0),
        FeatureSpec("embedded", spec.layer_indices, spec.dtype, spec.projection),
        rounds=RoundSource(
            head=OwnHead(
                HeadModel(
                    head, KvPool(head.kv_layout(PAGE_SIZE), num_pages + 50, pair.decoder.device)
                )
            ),
            pages=pages,
            trees={tree: max_sequences, **other_trees},
            max_context_tokens=max_context_tokens,
            is_pinned=is_pinned,
        ),
    )


def any_choice(
    seed: int,
) -> Callable[[LanePolicy, int, int, Iterable[TreeShape], float], ShapeOrPlain]:
    """Returns a `LanePolicy.choose` that changes about every third step, regardless of speed."""
    source = random.Random(seed)
    last: list[ShapeOrPlain] = [None]

    def choose(
        policy: LanePolicy,
        num_greedy: int,
        num_drawn: int,
        fitting: Iterable[TreeShape],
        now_s: float,
    ) -> ShapeOrPlain:
        options = [None, *fitting]
        if last[0] not in options or source.random() < 0.3:
            last[0] = source.choice(options)
        return last[0]

    return choose
