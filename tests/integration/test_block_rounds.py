"""The demo's DFlash head in rounds of the target that hosts it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from services.draft.settings_problems import DEMO
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.runtime.round_runner import RoundRunner
from tests.helpers.served import running_target

LONG = list(range(5, 205))
PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9], LONG)


async def _outputs(
    flags: Sequence[str], temperature: float
) -> tuple[list[list[int]], list[pb.SpeculationStats]]:
    arguments = [
        *("--model-path", str(DEMO / "target"), "--port", "0", "--device", "cpu"),
        *("--dtype", "float32", "--max-total-tokens", "2048", "--context-length", "512", *flags),
    ]
    async with running_target(arguments) as target:
        found = [await target.generate(prompt, temperature) for prompt in PROMPTS]
    return [tokens for tokens, _ in found], [stats for _, stats in found]


# A tree over the scores of the positions, and a chain. The last prompt outgrows the window.
@pytest.mark.parametrize("shape", [("7", "1", "8"), ("3", "3", "9")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_lanes_of_a_block_head_change_no_token(
    shape: Sequence[str], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []
    launch = RoundRunner.launch

    def counted(self: RoundRunner, masked: Iterable[int] = ()) -> None:
        launched.append(self.num_placed)
        launch(self, masked)

    monkeypatch.setattr(RoundRunner, "launch", counted)
    names = (
        "--speculative-num-steps",
        "--speculative-eagle-topk",
        "--speculative-num-draft-tokens",
    )
    flags = ["--draft", "embedded", "--speculative-algorithm", "DFLASH", "--device-rounds", "on"]
    flags += [f"{name}={value}" for name, value in zip(names, shape, strict=True)]
    flags += ["--speculative-dflash-draft-window-size", "128"]
    plain, _ = await _outputs((), temperature)
    drafted, stats = await _outputs(flags, temperature)
    assert drafted == plain
    assert sum(launched) > len(PROMPTS)
    assert sum(each.accepted_token_count for each in stats) > 0
