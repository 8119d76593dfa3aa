"""A served model with recurrent states, or several next-token layers, answers as without drafts."""

from __future__ import annotations

import pytest

from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from tests.helpers.checkpoints import DELTA, TinyShape, write_checkpoint
from tests.helpers.family_mtp import FAMILY_MTPS, write_family_mtp
from tests.helpers.served import running_target

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module", params=["draft model", "qwen3-next", "qwen3.5", "step 3.5"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the flags of a target and its draft, a model or the target's next-token layer."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    if request.param in FAMILY_MTPS:
        write_family_mtp(target, FAMILY_MTPS[request.param], 300, with_tokenizer=True)
        return ["--model-path", str(target), "--speculative-algorithm", "MTP"]
    shape = TinyShape(vocab_size=300, overrides=DELTA)
    write_checkpoint(target, "qwen3_5", shape, with_tokenizer=True)
    write_checkpoint(draft, "llama", TinyShape(vocab_size=300), with_tokenizer=True)
    return ["--model-path", str(target), "--speculative-draft-model-path", str(draft)]


@pytest.mark.parametrize("rounds", ["on", "off"])
async def test_output_is_the_same_and_drafted(models: list[str], rounds: str) -> None:
    arguments = [
        *models,
        *("--port", "0", "--device", "cpu", "--draft", "embedded"),
        *("--max-total-tokens", "2048", "--context-length", "120", "--device-rounds", rounds),
        *("--candidate-wait-sequences=99", "--candidate-wait-ms", "10000"),
        "--speculative-adaptive=false",
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
