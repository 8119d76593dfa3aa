"""First generations, so that no client pays for set-up that is done on first use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from services.target.engine import Engine
from services.target.requests.event_stream import EventStream
from services.target.requests.request import Finished, GenerationRequest
from shared.generation import Failed
from shared.tokens import SamplingParams, StopParams

_NUM_OUTPUT_TOKENS = 2
_NUM_LANE_TOKENS = 12
# Kernels are compiled for kinds of lengths: of one row, of a few, of multiples of 16 and others.
_PROMPT_LENGTHS = (2, 3, 9, 16, 17, 33, 64, 100, 129, 300, 512, 777, 1024)
# Prompts at once, and how long each is: products of other sizes take other kernels.
_GROUP_SIZES = (2, 4, 8, 16, 32, 64)
_GROUP_LENGTHS = (9, 16, 17, 65)
# Behind a prefix that is cached, attention has few rows and many keys.
_PREFIX_LENGTH = 512
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


async def warm_up(engine: Engine, num_prompt_tokens: int, most_at_once: int = 1) -> None:
    """Generates after prompts of many lengths, with every kind of sampling; on a CPU after one
    token alone. Nothing of it stays cached.

    Args:
        num_prompt_tokens: of the longest prompt.
        most_at_once: requests that may wait or run.

    Raises:
        OutriderError: the engine cannot serve.
    """
    await _generate(engine, [_request(engine, 0, num_prompt_tokens, _NUM_OUTPUT_TOKENS)])
    if engine.device.type == "cuda":
        await _warm_up_groups(engine, num_prompt_tokens, most_at_once)
    await asyncio.wrap_future(engine.flush_prefix_cache())


async def _warm_up_groups(engine: Engine, num_prompt_tokens: int, most_at_once: int) -> None:
    groups = [[length] for length in _PROMPT_LENGTHS]
    groups.append(list(_PROMPT_LENGTHS[:most_at_once]))
    groups += [[length] * size for size in _GROUP_SIZES for length in _GROUP_LENGTHS]
    prefix = (0,) * min(_PREFIX_LENGTH, num_prompt_tokens // 2)
    for group in groups:
        for shared in ((), prefix):
            if len(group) > most_at_once or len(shared) + max(group) >= num_prompt_tokens:
                continue
            requests = [
                _request(engine, key, length, _NUM_LANE_TOKENS, shared)
                for key, length in enumerate(group)
            ]
            await _generate(engine, requests)


def _request(
    engine: Engine,
    key: int,
    num_prompt_tokens: int,
    num_output_tokens: int,
    prefix: tuple[int, ...] = (),
) -> GenerationRequest:
    """Returns a request whose prompt is like no other's behind the prefix."""
    token_id = (31 * num_prompt_tokens + key) % engine.limits.vocab_size
    return GenerationRequest(
        request_id="warm-up",
        prompt_token_ids=(*prefix, *(token_id,) * num_prompt_tokens),
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
