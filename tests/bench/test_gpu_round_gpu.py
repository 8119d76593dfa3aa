"""The bench of rounds: acceptance is simulated in the rounds themselves."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from shared.speculation.tree import accept_rows, rows_of_parents
from shared.tokens import SamplingParams, TreeShape
from tests.bench.simulated_rounds import (
    SimulatedAcceptance,
    SimulatedVerification,
    force_path_plain,
)
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.device_rounds import DeviceRounds, load_pair
from tests.helpers.draft_heads import TinyHead
from tests.helpers.kernel_device import kernel_device

force_jit = pytest.importorskip("tests.bench.force_jit")
round_fused = pytest.importorskip("shared.runtime.round_fused")

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
VOCAB_SIZE = 200
COUNTS = [[3, 2], [0, 1], [1, 3]]


@pytest.mark.parametrize("shape", [TreeShape(4, 1, 5), TreeShape(3, 2, 8)], ids=str)
def test_rounds_accept_the_simulated_nodes_in_turn(
    shape: TreeShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = kernel_device()
    counts = [[*own, *[0] * 6] for own in COUNTS]
    real, acceptance = (
        round_fused.FusedRoundVerification,
        SimulatedAcceptance(counts, VOCAB_SIZE, device),
    )
    simulated = SimulatedVerification.over(acceptance, real)
    monkeypatch.setattr(round_fused, "FusedRoundVerification", simulated)
    target = write_checkpoint(tmp_path / "target", shape=TinyShape(vocab_size=VOCAB_SIZE))
    head = TinyHead(vocab_size=VOCAB_SIZE)
    pair = load_pair(target, tmp_path / "head", head, device)
    rounds = DeviceRounds(pair, shape, 4, is_recorded=False)
    for number, temperature in enumerate((0.0, 1.0)):
        rounds.add(number, [3, 5, 4, 1, 2 + number], SamplingParams(temperature, seed=number))
    found: list[list[int]] = []
    for _ in COUNTS:
        rounds.launch()
        found.append([len(each.token_ids) - 1 for each in rounds.runner.result()])
    # A capture of graphs has draws of its own.
    assert sorted(found) == sorted(COUNTS)


def test_paths_are_those_of_plain_torch() -> None:
    draw = torch.Generator().manual_seed(3)
    new = partial(torch.randint, size=(5, 9), generator=draw)
    parents = (torch.rand((5, 9), generator=draw) * torch.arange(9)).long()
    tree = rows_of_parents(new(0, 90), parents, 4)
    counts = torch.tensor([0, 1, 2, 3, 8], dtype=torch.int32)
    drawn, bonus = new(100, 190), torch.arange(200, 205)
    bonus[0] = tree.token_ids[0, 1]  # a child of the root, with which the path would go on
    forced, device = drawn.clone(), kernel_device()
    on_device = drawn.to(device)
    force_path_plain(forced, tree.token_ids, tree.parents, counts, bonus)
    given = [each.to(device) for each in (tree.token_ids, tree.parents, counts, bonus)]
    force_jit.force_path_fused(on_device, *given)
    assert torch.equal(on_device.cpu(), forced)
    assert forced[0, 0] == bonus[0] ^ 1
    accepted = accept_rows(tree, forced, 4)
    assert accepted.counts[:3].tolist() == [0, 1, 2]
    # The other paths end at leaves.
    ends = accepted.rows.gather(1, accepted.counts.unsqueeze(1))[3:]
    assert (ends > 0).all()
    assert not (tree.parents[3:, 1:] == ends).any()
