"""What next-token layers and block heads draft from a real target's features is what they would
draft from transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.draft.drafters.dflash import DflashDrafter
from services.draft.drafters.drafter import Drafter, Proposal
from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.multi_layer import MultiLayerDrafter
from services.draft.sequence import DraftSequence
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.heads.dflash import load_dflash
from shared.models.heads.head import DraftHead
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from shared.runtime.tree_model import HeadModel
from shared.tokens import SamplingParams, StopParams, TokenTree, TreeShape
from tests.helpers.checkpoints import TinyShape, build_model
from tests.helpers.dflash_heads import (
    DflashOracle,
    TinyDflash,
    best_block_paths,
    write_dflash,
)
from tests.helpers.drafting import plain_grower
from tests.helpers.engines import (
    CPU,
    PAGE_SIZE,
    VOCAB_SIZE,
    build_engine,
    request,
    run,
    run_plain,
)
from tests.helpers.family_mtp import FAMILY_MTPS, FamilyOracle, write_family_mtp
from tests.helpers.head_oracle import Values, best_paths, path_values
from tests.helpers.mtp_heads import MtpOracle, TinyMtp, write_mtp
from tests.helpers.wired_draft import WiredDraft

TARGET = TinyShape(vocab_size=VOCAB_SIZE)
MTP = TinyMtp(num_layers=2, shape=TARGET)
DFLASH = TinyDflash(
    vocab_size=VOCAB_SIZE,
    mask_token_id=VOCAB_SIZE - 1,
    num_features=2,
    target_layer_ids=(1, 0),
    config={"num_target_layers": 3},
)
SHAPE = TreeShape(3, 3, 9)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
Expected = Callable[[list[int], SamplingParams], Values]


@dataclass(frozen=True)
class Setup:
    """A target's folder, a drafter for it, and what that should propose.

    Attributes:
        expected: of committed tokens, from what the target computes in transformers.
    """

    folder: Path
    drafter: Drafter
    expected: Expected


def _mtp(folder: Path) -> Setup:
    write_mtp(folder, MTP)
    target = TargetFolder(folder, dtype=torch.float32, device=CPU)
    head = load_mtp(folder, target, dtype=torch.float32, device=CPU)
    oracle, states = MtpOracle(MTP, folder), _hidden_states()

    def expected(tokens: list[int], sampling: SamplingParams) -> Values:
        return best_paths(oracle, tokens, states(tokens)[-1], sampling, SHAPE)

    return Setup(folder, _drafter(head), expected)


def _drafter(head: DraftHead) -> EagleDrafter:
    has_one_layer, pool = len(head.layers) == 1, KvPool(head.kv_layout(PAGE_SIZE), 200, CPU)
    kind = EagleDrafter if has_one_layer else MultiLayerDrafter
    return kind(
        HeadModel(head, pool),
        KvLeases(200, PAGE_SIZE, prefix_cache=False),
        max_context_tokens=128,
        keeps_features=False,
        grower=plain_grower(HeadModel(head, pool), 128) if has_one_layer else None,
    )


def _hidden_states() -> Callable[[list[int]], list[Tensor]]:
    """Returns what computes a target's hidden states of committed tokens in transformers: the
    inputs of its layers, and last the output of its final norm."""
    model = build_model("llama", TARGET)

    def states(token_ids: list[int]) -> list[Tensor]:
        with torch.no_grad():
            output = model(torch.tensor([token_ids[:-1]]), output_hidden_states=True)
        return [each[0] for each in output.hidden_states]

    return states


def _family(name: str, folder: Path) -> Setup:
    mtp = FAMILY_MTPS[name]
    oracle = FamilyOracle(mtp, write_family_mtp(folder, mtp, VOCAB_SIZE), VOCAB_SIZE)
    target = TargetFolder(folder, dtype=torch.float32, device=CPU)
    head = load_mtp(folder, target, dtype=torch.float32, device=CPU)

    def expected(tokens: list[int], sampling: SamplingParams) -> Values:
        return best_paths(oracle, tokens, oracle.features(tokens[:-1]), sampling, SHAPE)

    return Setup(folder, _drafter(head), expected)


def _dflash(folder: Path) -> Setup:
    write_mtp(folder, TinyMtp(shape=TARGET))
    target = TargetFolder(folder, dtype=torch.float32, device=CPU)
    head_folder = write_dflash(folder / "head", DFLASH)
    head = load_dflash(head_folder, target, dtype=torch.float32, device=CPU)
    leases = KvLeases(200, PAGE_SIZE, prefix_cache=False)
    pool = KvPool(head.kv_layout(PAGE_SIZE), 200, CPU)
    drafter = DflashDrafter(head, pool, leases, block_size=5, window_tokens=100)
    oracle = DflashOracle(
        DFLASH, target_embedding=target.embedding(), target_lm_head=target.lm_head()
    )

    states = _hidden_states()

    def expected(tokens: list[int], sampling: SamplingParams) -> Values:
        # The outputs of layers 1 and 0 are the inputs of layers 2 and 1.
        _, first, second, *_ = states(tokens)
        logits = oracle.block_logits(tokens, torch.cat((second, first), dim=1))
        return best_block_paths(logits, sampling, SHAPE, num_tokens=len(tokens))

    return Setup(folder, drafter, expected)


@pytest.mark.parametrize("seed", [None, 7], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "build",
    [_mtp, _dflash, partial(_family, "qwen3.5"), partial(_family, "step 3.5")],
    ids=["mtp", "dflash", "qwen3.5", "step 3.5"],
)
def test_trees_are_those_of_the_targets_true_features(
    build: Callable[[Path], Setup],
    seed: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = build(tmp_path)
    seen: list[tuple[list[int], SamplingParams, TokenTree]] = []
    propose = setup.drafter.propose

    def recorded(sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        proposals = propose(sequences, shape)
        seen.extend((list(p.sequence.token_ids), p.sequence.sampling, p.tree) for p in proposals)
        return proposals

    monkeypatch.setattr(setup.drafter, "propose", recorded)
    decoder = load_decoder(setup.folder, dtype=torch.float32, device=CPU)
    engine = build_engine(decoder, max_step_rows=16)
    WiredDraft(engine, setup.drafter, SHAPE).attach()
    sampling = SamplingParams(temperature=0.0) if seed is None else SamplingParams(seed=seed)
    requests = [
        request(prompt, sampling, StopParams(12)) for prompt in (PROMPT, PROMPT[:9], PROMPT[4:])
    ]
    answers, plain = run(engine, requests), run_plain(decoder, requests)
    assert [answers.token_ids(i) for i in range(3)] == [plain.token_ids(i) for i in range(3)]
    num_grown = 0
    for token_ids, own_sampling, tree in seen:
        if len(tree):
            expected = setup.expected(token_ids, own_sampling)
            assert path_values(tree) == pytest.approx(expected, abs=2e-3)
            num_grown += 1
    assert num_grown >= 12
    setup.drafter.check()
