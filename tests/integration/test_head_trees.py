"""What a head drafts from a real target's features is what it would draft from transformers'.

The target's engine, the wire's messages and the drafter are real; only the sockets are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.draft.drafters.drafter import Proposal
from services.draft.drafters.eagle import EagleDrafter
from services.draft.sequence import DraftSequence
from services.target.step_report import OutcomeTally
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.heads.config import HeadKind
from shared.models.heads.head import DraftHead
from shared.models.heads.loader import load_head
from shared.models.heads.target_tensors import TargetFolder
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import HeadModel
from shared.runtime.tree_pass import PassLimits
from shared.tokens import SamplingParams, StopParams, TokenTree, TreeShape
from tests.helpers.checkpoints import TinyShape, build_model
from tests.helpers.draft_heads import TinyHead, head_tensors, write_head
from tests.helpers.engines import (
    CPU,
    PAGE_SIZE,
    VOCAB_SIZE,
    build_engine,
    request,
    run,
    run_plain,
    tiny_decoder,
)
from tests.helpers.head_oracle import HeadOracle, best_paths, path_values
from tests.helpers.wired_draft import WiredDraft

SHAPE = TreeShape(3, 3, 9)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
HEADS = {
    "EAGLE": TinyHead(vocab_size=VOCAB_SIZE, has_embedding=False),
    "EAGLE3": TinyHead(
        kind="EAGLE3", vocab_size=VOCAB_SIZE, draft_vocab_size=15, has_embedding=False
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return tiny_decoder(folder, num_layers=3)


@pytest.fixture(params=HEADS)
def tiny(request: pytest.FixtureRequest) -> TinyHead:
    return HEADS[request.param]


class RecordingDrafter(EagleDrafter):
    """Keeps what it proposed for which tokens."""

    seen: list[tuple[list[int], SamplingParams, TokenTree]]

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        proposals = super().propose(sequences, shape)
        self.seen += [(list(p.sequence.token_ids), p.sequence.sampling, p.tree) for p in proposals]
        return proposals


def _drafter(folder: Path, target: Path, tiny: TinyHead) -> RecordingDrafter:
    tensors = TargetFolder(target, dtype=torch.float32, device=CPU)
    head: DraftHead = load_head(
        write_head(folder, tiny), HeadKind(tiny.kind), tensors, dtype=torch.float32, device=CPU
    )
    pool = KvPool(head.kv_layout(PAGE_SIZE), 200, CPU)
    limits = PassLimits(8, 128, has_graphs=False)
    drafter = RecordingDrafter(
        HeadModel(head, pool),
        KvLeases(200, PAGE_SIZE),
        max_context_tokens=128,
        keeps_features=False,
        grower=TreeGrower(HeadModel(head, pool), limits),
    )
    drafter.seen = []
    return drafter


class TransformersTarget:
    """The same target in transformers, asked for all of its hidden states."""

    def __init__(self) -> None:
        self.model = build_model("llama", TinyShape(vocab_size=VOCAB_SIZE), seed=3)

    @torch.no_grad()
    def features(self, tiny: TinyHead, token_ids: Sequence[int]) -> Tensor:
        output = self.model(torch.tensor([token_ids]), output_hidden_states=True)
        states = output.hidden_states
        # Of 3 layers; the last entry is behind the final norm, the others enter a layer.
        wanted = [states[-1]] if tiny.kind == "EAGLE" else [states[2], states[1], states[0]]
        return torch.cat([each[0] for each in wanted], dim=1)

    def oracle(self, tiny: TinyHead) -> HeadOracle:
        weights = self.model.state_dict()
        return HeadOracle(
            tiny,
            head_tensors(tiny),
            target_embedding=weights["model.embed_tokens.weight"],
            target_lm_head=weights["lm_head.weight"],
        )


def _check(drafter: RecordingDrafter, tiny: TinyHead) -> int:
    """Compares every tree with the oracle's; returns how many were not empty."""
    target = TransformersTarget()
    oracle, num_grown = target.oracle(tiny), 0
    for token_ids, sampling, tree in drafter.seen:
        if len(tree):
            features = target.features(tiny, token_ids[:-1])
            expected = best_paths(oracle, token_ids, features, sampling, SHAPE)
            assert path_values(tree) == pytest.approx(expected, abs=2e-3)
            num_grown += 1
    return num_grown


@pytest.mark.parametrize("seed", [None, 7], ids=["greedy", "sampled"])
def test_trees_are_those_of_the_targets_true_features(
    tiny: TinyHead, seed: int | None, decoder: Decoder, folder: Path, tmp_path: Path
) -> None:
    engine = build_engine(decoder, max_step_rows=16)
    drafter = _drafter(tmp_path, folder, tiny)
    draft = WiredDraft(engine, drafter, SHAPE)
    draft.attach()
    sampling = SamplingParams(temperature=0.0) if seed is None else SamplingParams(seed=seed)
    prompts = [PROMPT, PROMPT[:9], PROMPT[4:]]
    requests = [request(prompt, sampling, StopParams(12)) for prompt in prompts]
    answers = run(engine, requests)
    plain = run_plain(decoder, requests)
    assert [answers.token_ids(i) for i in range(3)] == [plain.token_ids(i) for i in range(3)]
    assert _check(drafter, tiny) >= 20
    drafter.check()


def test_a_prompt_from_the_prefix_cache_is_drafted_for_as_a_new_one_is(
    tiny: TinyHead, decoder: Decoder, folder: Path, tmp_path: Path
) -> None:
    engine = build_engine(decoder)
    drafter = _drafter(tmp_path, folder, tiny)
    WiredDraft(engine, drafter, SHAPE).attach()
    for _ in range(2):
        run(engine, [request(PROMPT, stop=StopParams(6))])
    half = len(drafter.seen) // 2
    first, second = drafter.seen[:half], drafter.seen[half:]
    assert [tokens for tokens, _, _ in first] == [tokens for tokens, _, _ in second]
    assert [len(tree) for _, _, tree in first] == [len(tree) for _, _, tree in second]
    assert _check(drafter, tiny) >= 6


@pytest.mark.parametrize("seed", [7, None], ids=["sampled", "greedy"])
def test_drafting_ahead_from_recurrent_states_changes_nothing(
    tiny: TinyHead,
    seed: int | None,
    decoder: Decoder,
    folder: Path,
    tmp_path: Path,
) -> None:
    total = OutcomeTally()
    engine = build_engine(
        decoder, max_step_rows=16, on_step=lambda report: total.add(report.outcomes)
    )
    drafter = _drafter(tmp_path, folder, tiny)
    WiredDraft(engine, drafter, SHAPE, 8).attach()
    sampling = SamplingParams(temperature=0.0) if seed is None else SamplingParams(seed=seed)
    requests = [request(prompt, sampling, StopParams(24)) for prompt in (PROMPT, PROMPT[:9])]
    answers = run(engine, requests)
    plain = run_plain(decoder, requests)
    assert [answers.token_ids(i) for i in range(2)] == [plain.token_ids(i) for i in range(2)]
    # A head of random weights guesses badly, but it does foresee some verdicts.
    assert total.num_hits > 0
    assert total.num_unprepared <= 2
    drafter.check()
