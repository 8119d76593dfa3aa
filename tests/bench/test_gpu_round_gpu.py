"""The bench of rounds: acceptance is simulated in the rounds themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.tokens import SamplingParams, TreeShape
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.device_rounds import DeviceRounds, load_pair
from tests.helpers.draft_heads import TinyHead
from tests.helpers.kernel_device import kernel_device

bench = pytest.importorskip("tests.bench.gpu_round")
round_fused = pytest.importorskip("shared.runtime.round_fused")

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
VOCAB_SIZE = 200


@pytest.mark.parametrize("shape", [TreeShape(4, 1, 5), TreeShape(3, 2, 8)], ids=str)
def test_every_round_accepts_as_many_nodes(
    shape: TreeShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_fused, "FusedRoundVerification", bench.SimulatedVerification)
    target = write_checkpoint(tmp_path / "target", shape=TinyShape(vocab_size=VOCAB_SIZE))
    head = TinyHead(vocab_size=VOCAB_SIZE)
    pair = load_pair(target, tmp_path / "head", head, kernel_device())
    rounds = DeviceRounds(pair, shape, 4, is_recorded=False)
    for number, temperature in enumerate((0.0, 1.0)):
        rounds.add(number, [3, 5, 4, 1, 2 + number], SamplingParams(temperature, seed=number))
    for _ in range(2):
        rounds.launch()
        results = rounds.runner.result()
        assert [len(found.token_ids) for found in results] == [bench.NUM_ACCEPTED + 1] * 2
