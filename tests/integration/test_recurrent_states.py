"""A served model with recurrent states answers the same with drafts as without."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from tests.helpers.checkpoints import DELTA, TinyShape, write_checkpoint
from tests.helpers.served import running_target

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    shape = TinyShape(vocab_size=300, overrides=DELTA)
    write_checkpoint(target, "qwen3_5", shape, with_tokenizer=True)
    write_checkpoint(draft, "llama", TinyShape(vocab_size=300), with_tokenizer=True)
    return target, draft


@pytest.mark.parametrize("rounds", ["on", "off"])
async def test_output_is_the_same_and_drafted(folders: tuple[Path, Path], rounds: str) -> None:
    target, draft = folders
    arguments = [
        *("--model-path", str(target), "--port", "0", "--device", "cpu", "--draft", "embedded"),
        *("--max-total-tokens", "2048", "--context-length", "120", "--device-rounds", rounds),
        *("--candidate-wait-sequences=99", "--candidate-wait-ms", "10000"),
        *("--speculative-adaptive=false", "--speculative-draft-model-path", str(draft)),
    ]
    if rounds == "on":
        # Pinned, so that rounds draw trees although none of a random draft is accepted.
        arguments += [
            *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", "4"),
        ]
    async with running_target(arguments) as running:
        for temperature in (0.0, 1.0):
            disabled = pb.SpeculationParams(disabled=True)
            plain, _ = await running.generate(PROMPT, temperature, disabled)
            output, stats = await running.generate(PROMPT, temperature)
            assert output == plain
            assert stats.drafted_token_count > 0
