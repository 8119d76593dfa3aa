"""Warm-up generations, so that no request pays for set-up on first use."""

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
# Kernels are specialised by length: one row, a few rows, multiples of 16, and other lengths.
_PROMPT_LENGTHS = (2, 3, 9, 16, 17, 33, 64, 100, 129, 300, 512, 777, 1024)
# Concurrent prompts, and their lengths: matrix products of other sizes use other kernels.
_GROUP_SIZES = (2, 4, 8, 16, 32, 64)
_GROUP_LENGTHS = (9, 16, 17, 65)
# Behind a cached prefix, attention has few rows and many keys.
_PREFIX_LENGTH = 512
_SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2),
    SamplingParams(temperature=0.7, frequency_penalty=0.5, logit_bias={0: -1.0}, seed=3),
)


def warm_up_tokens(engine: Engine, chunk_tokens: int) -> int:
    """Returns the number of tokens of the longest warm-up prompt. On a GPU it is as long as a step
    may compute, so that missing memory is found now."""
    if engine.device.type != "cuda":
        return 1
    return max(1, min(chunk_tokens, engine.limits.max_sequence_tokens - _NUM_OUTPUT_TOKENS))


async def warm_up(engine: Engine, num_prompt_tokens: int, most_at_once: int = 1) -> None:
    """Generates with prompts of many lengths and every kind of sampling; on a CPU only with the
    longest prompt. At the end the prefix cache is flushed, and how fast drafts were is forgotten.

    Args:
        num_prompt_tokens: length of the longest prompt.
        most_at_once: most requests that may wait or run.

    Raises:
        OutriderError: the engine cannot serve.
    """
    await _generate(engine, [_request(engine, 0, num_prompt_tokens, _NUM_OUTPUT_TOKENS)])
    if engine.device.type == "cuda":
        await _warm_up_groups(engine, num_prompt_tokens, most_at_once)
    await asyncio.wrap_future(engine.flush_prefix_cache())
    # Kernels were compiled and graphs captured, and texts of one token are no user's.
    await asyncio.wrap_future(engine.renew_policies())


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
    """Returns a request whose prompt differs from all others behind the prefix."""
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
