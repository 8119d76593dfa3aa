"""First generations, so that no client pays for set-up that is done on first use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from services.target.engine import Engine
from services.target.requests.event_stream import EventStream
from services.target.requests.request import Failed, Finished, GenerationRequest
from shared.tokens import SamplingParams, StopParams

_NUM_OUTPUT_TOKENS = 2
_NUM_LANE_TOKENS = 12
# Kernels are compiled for kinds of lengths: of one row, of a few, of multiples of 16 and others.
_PROMPT_LENGTHS = (2, 3, 9, 16, 17, 33, 64, 100, 129, 300, 512, 777, 1024)
# Prompts at once, and how long each is: products of other sizes take other kernels.
_GROUP_SIZES = (2, 4, 8, 16, 32, 64)
_GROUP_LENGTHS = (3, 9, 16, 17, 33, 65, 130)
_SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2),
    SamplingParams(temperature=0.7, frequency_penalty=0.5, logit_bias={0: -1.0}, seed=3),
)


def warm_up_tokens(engine: Engine, chunk_tokens: int) -> int:
    """Returns the tokens of the longest prompt to warm up with: on a GPU as many as a step may
    compute, so that memory for them is there, or is found missing now."""
    if engine.device.type != "cuda":
        return 1
    return max(1, min(chunk_tokens, engine.limits.max_sequence_tokens - _NUM_OUTPUT_TOKENS))


async def warm_up(engine: Engine, num_prompt_tokens: int) -> None:
    """Generates after prompts of many lengths, with every kind of sampling; on a CPU after one
    token alone. Nothing of it stays cached.

    Raises:
        OutriderError: the engine cannot serve.
    """
    await _generate(engine, [_request(engine, 0, num_prompt_tokens, _NUM_OUTPUT_TOKENS)])
    if engine.device.type == "cuda":
        lengths = [each for each in _PROMPT_LENGTHS if each < num_prompt_tokens]
        for length in lengths:
            await _generate(engine, [_request(engine, 0, length, _NUM_LANE_TOKENS)])
        groups = [lengths]
        groups += [[length] * size for size in _GROUP_SIZES for length in _GROUP_LENGTHS]
        for group in groups:
            requests = [_request(engine, key, n, _NUM_LANE_TOKENS) for key, n in enumerate(group)]
            await _generate(engine, requests)
    await asyncio.wrap_future(engine.flush_prefix_cache())


def _request(
    engine: Engine, key: int, num_prompt_tokens: int, num_output_tokens: int
) -> GenerationRequest:
    """Returns a request whose prompt is like no other's, so that none is cached."""
    token_id = (31 * num_prompt_tokens + key) % engine.limits.vocab_size
    return GenerationRequest(
        request_id="warm-up",
        prompt_token_ids=(token_id,) * num_prompt_tokens,
        sampling=_SAMPLINGS[(key + num_prompt_tokens) % len(_SAMPLINGS)],
        stop=StopParams(num_output_tokens, ignore_eos=True),
        arrival_s=time.monotonic(),
        top_logprobs=1 if key == 1 else None,
    )


async def _generate(engine: Engine, requests: Sequence[GenerationRequest]) -> None:
    stream = EventStream(asyncio.get_running_loop())
    for key, request in enumerate(requests):
        engine.submit(request, stream, key)
    num_left = len(requests)
    while num_left:
        for _, event in await stream.next_batch():
            if isinstance(event, Failed):
                raise event.error
            num_left -= isinstance(event, Finished)
