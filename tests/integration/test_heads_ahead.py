"""Heads that draft ahead change nothing but the speed, however the draft's words fare.

As in `test_drafting_ahead`, only the sockets are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from services.draft.drafters.dflash import DflashDrafter
from services.draft.drafters.drafter import Drafter
from services.draft.drafters.eagle import EagleDrafter
from services.target.step_report import StepReport
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.heads.dflash import load_dflash
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import HeadModel
from shared.runtime.tree_pass import PassLimits
from shared.tokens import TreeShape
from tests.helpers.ahead_cases import (
    CHAIN,
    SAMPLINGS,
    TREE,
    lossy_draft,
    outputs,
    requests,
    total_outcomes,
)
from tests.helpers.checkpoints import TinyShape
from tests.helpers.dflash_heads import TinyDflash, write_dflash
from tests.helpers.engines import (
    CPU,
    PAGE_SIZE,
    VOCAB_SIZE,
    build_engine,
    run,
    run_plain,
)
from tests.helpers.mtp_heads import TinyMtp, write_mtp
from tests.helpers.wired_draft import WiredDraft

# Heads of random weights foresee little; many guesses hit now and then.
BUDGET = 16
TARGET = TinyShape(vocab_size=VOCAB_SIZE)
DFLASH = TinyDflash(
    vocab_size=VOCAB_SIZE,
    mask_token_id=VOCAB_SIZE - 1,
    num_features=2,
    target_layer_ids=(1, 0),
    config={"num_target_layers": 3},
)
Build = Callable[[Path, int], Drafter]
Case = TypeVar("Case")
Head = tuple[Decoder, Callable[[int], Drafter]]
"""A target, and what builds a drafter for it of some pages."""


def _mtp(folder: Path, num_pages: int) -> Drafter:
    target = TargetFolder(folder, dtype=torch.float32, device=CPU)
    head = load_mtp(folder, target, dtype=torch.float32, device=CPU)
    pool = KvPool(head.kv_layout(PAGE_SIZE), num_pages, CPU)
    limits = PassLimits(16, 128, has_graphs=False)
    return EagleDrafter(
        HeadModel(head, pool),
        KvLeases(num_pages, PAGE_SIZE),
        max_context_tokens=128,
        keeps_features=False,
        grower=TreeGrower(HeadModel(head, pool), limits),
    )


def _dflash(folder: Path, num_pages: int) -> Drafter:
    target = TargetFolder(folder, dtype=torch.float32, device=CPU)
    head_folder = write_dflash(folder / "head", DFLASH)
    head = load_dflash(head_folder, target, dtype=torch.float32, device=CPU)
    leases = KvLeases(num_pages, PAGE_SIZE, prefix_cache=False)
    pool = KvPool(head.kv_layout(PAGE_SIZE), num_pages, CPU)
    return DflashDrafter(head, pool, leases, block_size=5, window_tokens=100)


HEADS: dict[str, Build] = {"MTP": _mtp, "DFLASH": _dflash}


@pytest.fixture(scope="module")
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Head:
    build = HEADS[request.param]
    folder = tmp_path_factory.mktemp("target")
    write_mtp(folder, TinyMtp(shape=TARGET))
    decoder = load_decoder(folder, dtype=torch.float32, device=CPU)
    return decoder, lambda num_pages: build(folder, num_pages)


CASES = [
    ("greedy", TREE, False),
    ("sampled", CHAIN, False),
    ("penalised", TREE, False),
    ("greedy", CHAIN, True),
    ("sampled", TREE, True),
]
LOSSES = [(0, False), (1, False), (2, False), (0, True), (1, True)]


def _spread(cases: Sequence[Case], count: int) -> list[tuple[str, Case]]:
    """Gives each head some of the cases, and each case to some of the heads: by turns."""
    return [
        (name, cases[(place + step) % len(cases)])
        for place, name in enumerate(HEADS)
        for step in range(count)
    ]


@pytest.mark.parametrize(("head", "case"), _spread(CASES, len(CASES)), indirect=["head"], ids=str)
def test_verdicts_that_were_foreseen_are_verified_at_once_and_change_nothing(
    head: Head, case: tuple[str, TreeShape, bool]
) -> None:
    decoder, build = head
    name, shape, selects = case
    sampling = SAMPLINGS[name]
    expected = outputs(run_plain(decoder, requests(sampling)))
    reports: list[StepReport] = []
    engine = build_engine(decoder, on_step=reports.append, selects=selects)
    drafter = build(200)
    WiredDraft(engine, drafter, shape, BUDGET).attach()
    assert outputs(run(engine, requests(sampling))) == expected
    drafter.check()
    # Passes, which draft ahead, take no penalties.
    is_ahead = not (sampling.has_penalties and isinstance(drafter, EagleDrafter))
    assert (total_outcomes(reports).num_hits > 0) == is_ahead
    assert any(each.round_shape is not None for each in reports) == selects


@pytest.mark.parametrize(("head", "case"), _spread(LOSSES, len(LOSSES)), indirect=["head"], ids=str)
def test_delays_losses_repetitions_and_reconnects_change_nothing(
    head: Head, case: tuple[int, bool]
) -> None:
    decoder, build = head
    seed, selects = case
    sampling = list(SAMPLINGS.values())[seed]
    expected = outputs(run_plain(decoder, requests(sampling)))
    engine = build_engine(decoder, selects=selects)
    drafter = build(200)
    draft = lossy_draft(engine, drafter, BUDGET, seed)
    assert outputs(run(engine, requests(sampling), each_step=draft.each_step)) == expected
    drafter.check()


@pytest.mark.parametrize(("head", "num_pages"), _spread([9, 14], 2), indirect=["head"])
def test_short_draft_memory_changes_nothing(head: Head, num_pages: int) -> None:
    decoder, build = head
    sampling = SAMPLINGS["sampled"]
    expected = outputs(run_plain(decoder, requests(sampling, 20)))
    engine, drafter = build_engine(decoder), build(num_pages)
    WiredDraft(engine, drafter, TREE, BUDGET).attach()
    assert outputs(run(engine, requests(sampling, 20))) == expected
    drafter.check()
