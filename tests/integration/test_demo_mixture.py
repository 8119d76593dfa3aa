"""The demo's mixture of experts, named without a path and drafted for by its own layer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer

from shared.hub import BUILT_IN
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from tests.helpers.served import running_target

FOLDER = BUILT_IN["demo-moe"]
QUESTIONS = ("What is the capital of France?", "Which currency is used in Japan?", "What is 3 + 4?")


async def _answers(
    flags: Sequence[str], temperature: float
) -> tuple[list[list[int]], list[pb.SpeculationStats]]:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    arguments = [
        *("--model-path", "demo-moe", "--port", "0", "--device", "cpu", "--dtype", "float32"),
        *(
            "--max-total-tokens",
            "2048",
            "--context-length",
            "256",
            "--candidate-wait-sequences=99",
            *flags,
        ),
    ]

    async def one(stub: pb_grpc.TargetServiceStub, question: str) -> list[pb.GenerateResponse]:
        request = pb.GenerateRequest(
            prompt_token_ids=tokenizer.encode(form.format(question)).ids,
            sampling_params=sampling_pb2.SamplingParams(temperature=temperature, seed=5),
            stop_params=sampling_pb2.StopParams(max_output_token_count=40),
        )
        return [response async for response in stub.Generate(request)]

    async with running_target(arguments) as target:
        found = await asyncio.gather(*(one(target.stub, each) for each in QUESTIONS))
    tokens = [[token for each in one for token in each.delta.token_ids] for one in found]
    return tokens, [one[-1].finished.speculation for one in found]


# One process, or two that have experts and sequences of their own.
SPREAD = ("--tp-size", "2", "--ep-size", "2", "--dp-size", "2", "--enable-dp-attention")


@pytest.mark.parametrize(
    ("rounds", "spread"), [("on", ()), ("off", ()), ("on", SPREAD), ("off", SPREAD)]
)
async def test_its_own_layer_drafts_and_changes_no_token(
    rounds: str, spread: tuple[str, ...]
) -> None:
    mtp = (
        *spread,
        "--draft",
        "embedded",
        "--speculative-algorithm",
        "MTP",
        "--device-rounds",
        rounds,
    )
    # Pinned: on a busy machine the costs measured at start may speak for plain steps.
    mtp += ("--speculative-num-steps", "2", "--speculative-eagle-topk", "1")
    mtp += ("--speculative-num-draft-tokens", "3")
    for temperature in (0.0, 0.8):
        plain, _ = await _answers((), temperature)
        drafted, stats = await _answers(mtp, temperature)
        assert drafted == plain
        assert sum(each.accepted_token_count for each in stats) > 0
        if temperature == 0.0:
            tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
            assert "Paris" in tokenizer.decode(drafted[0])
