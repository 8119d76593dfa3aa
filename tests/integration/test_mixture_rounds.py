"""Mixtures of experts answer the same with their own next-token layer drafting as without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.draft.drafters.eagle import EagleDrafter
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from shared.runtime.tree_model import HeadModel
from shared.tokens import SamplingParams, StopParams, TreeShape
from tests.helpers.drafting import plain_grower
from tests.helpers.engines import (
    CPU,
    PAGE_SIZE,
    build_engine,
    request,
    run,
    run_plain,
)
from tests.helpers.mixtures import MIXTURES, write_mixture
from tests.helpers.wired_draft import WiredDraft

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]


@pytest.mark.parametrize("seed", [None, 7], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", MIXTURES)
def test_answers_do_not_depend_on_the_draft(
    family: str, seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mixture(tmp_path, family)
    target = TargetFolder(tmp_path, dtype=torch.float32, device=CPU)
    head = load_mtp(tmp_path, target, dtype=torch.float32, device=CPU)
    pool = KvPool(head.kv_layout(PAGE_SIZE), 200, CPU)
    drafter = EagleDrafter(
        HeadModel(head, pool),
        KvLeases(200, PAGE_SIZE, prefix_cache=True),
        max_context_tokens=128,
        keeps_features=False,
        grower=plain_grower(HeadModel(head, pool), 128),
    )
    num_proposed, propose = 0, drafter.propose

    def counted(sequences, shape):  # type: ignore[no-untyped-def]
        nonlocal num_proposed
        proposals = propose(sequences, shape)
        num_proposed += sum(len(each.tree) for each in proposals)
        return proposals

    monkeypatch.setattr(drafter, "propose", counted)
    decoder = load_decoder(tmp_path, dtype=torch.float32, device=CPU)
    engine = build_engine(decoder, max_step_rows=16)
    WiredDraft(engine, drafter, TreeShape(3, 3, 9)).attach()
    sampling = SamplingParams(temperature=0.0) if seed is None else SamplingParams(seed=seed)
    requests = [
        request(prompt, sampling, StopParams(12)) for prompt in (PROMPT, PROMPT[:9], PROMPT[4:])
    ]
    answers, plain = run(engine, requests), run_plain(decoder, requests)
    assert [answers.token_ids(i) for i in range(3)] == [plain.token_ids(i) for i in range(3)]
    assert num_proposed >= 30
    drafter.check()
