"""What the trainer writes is read as it was meant: served heads draft what training counted on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from services.draft.drafters.dflash import DflashDrafter
from services.draft.drafters.drafter import Drafter
from services.draft.drafters.eagle import EagleDrafter
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from services.draft.training.acceptance import draft_chains
from services.draft.training.frozen_target import FrozenTarget
from services.draft.training.head_shape import Algorithm
from services.draft.training.heads import build_head, save_head
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.heads.config import HeadKind
from shared.models.heads.dflash import load_dflash
from shared.models.heads.head import DraftHead
from shared.models.heads.loader import load_head
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.runtime.tree_model import HeadModel
from shared.tokens import SamplingParams, TreeShape
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.drafting import plain_grower

CPU = torch.device("cpu")
NUM_STEPS = 4
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 60, 2, 44, 1]
GREEDY = SamplingParams(temperature=0.0)


def _mtp(folder: Path, target: TargetFolder) -> Drafter:
    head = load_mtp(folder, target, dtype=torch.float32, device=CPU)
    return _drafter(head)


def _eagle(kind: HeadKind) -> Callable[[Path, TargetFolder], Drafter]:
    def build(folder: Path, target: TargetFolder) -> Drafter:
        head = load_head(folder, kind, target, dtype=torch.float32, device=CPU)
        return _drafter(head)

    return build


def _drafter(head: DraftHead) -> EagleDrafter:
    pool = KvPool(head.kv_layout(4), 40, CPU)
    return EagleDrafter(
        HeadModel(head, pool),
        KvLeases(40, 4),
        max_context_tokens=128,
        keeps_features=False,
        grower=plain_grower(HeadModel(head, pool), 128),
    )


def _dflash(folder: Path, target: TargetFolder) -> Drafter:
    head = load_dflash(folder, target, dtype=torch.float32, device=CPU)
    return DflashDrafter(
        head,
        KvPool(head.kv_layout(4), 40, CPU),
        KvLeases(40, 4, prefix_cache=False),
        block_size=head.config.block_size,
        window_tokens=100,
    )


@pytest.mark.parametrize(
    ("algorithm", "own_vocabulary", "build"),
    [
        (Algorithm.EAGLE, None, _eagle(HeadKind.EAGLE)),
        (Algorithm.EAGLE3, None, _eagle(HeadKind.EAGLE3)),
        (Algorithm.EAGLE3, range(0, 64, 2), _eagle(HeadKind.EAGLE3)),
        (Algorithm.MTP, None, _mtp),
        (Algorithm.DFLASH, None, _dflash),
    ],
    ids=["EAGLE", "EAGLE3", "EAGLE3-cut", "MTP", "DFLASH"],
)
def test_a_served_head_drafts_as_in_training(
    algorithm: Algorithm,
    own_vocabulary: Sequence[int] | None,
    build: Callable[[Path, TargetFolder], Drafter],
    tmp_path: Path,
) -> None:
    folder = write_checkpoint(tmp_path / "target", shape=TinyShape(vocab_size=64, num_layers=6))
    frozen = FrozenTarget.load(folder, device=CPU, dtype=torch.float32)
    sizes = frozen.head_shape(
        algorithm,
        num_layers=2 if algorithm is Algorithm.DFLASH else None,
        block_size=5,
        draft_vocab_size=None if own_vocabulary is None else len(own_vocabulary),
    )
    trained = build_head(sizes, own_vocabulary).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.25 * torch.randn(parameter.shape, generator=draw))
    save_head(trained, tmp_path / "head", dtype=torch.float32)
    drafter = build(tmp_path / "head", TargetFolder(folder, dtype=torch.float32, device=CPU))
    expected = draft_chains(trained, frozen, torch.tensor(TOKENS), num_steps=NUM_STEPS)
    spec = drafter.limits.feature_spec
    assert spec is not None
    rows = frozen.read(torch.tensor([TOKENS]), spec.layer_indices).features[0]
    rows = rows if spec.projection is None else rows @ spec.projection.T
    shape = TreeShape(NUM_STEPS, 1, NUM_STEPS + 1)
    for count in range(2, len(TOKENS) + 1):
        sequence = DraftSequence(
            SequenceKey(1, count), TOKENS[:count], count, GREEDY, 0, True, 64, 256
        )
        drafter.open(sequence)
        drafter.add_features(sequence, FeatureRows(0, rows[: count - 1]))
        assert drafter.reserve(sequence, shape)
        (proposal,) = drafter.propose([sequence], shape)
        assert list(proposal.tree.token_ids) == expected[count - 2].tolist()
        drafter.close(sequence)
