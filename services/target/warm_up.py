"""A first generation, so that the first client does not pay for lazy set-up."""

from __future__ import annotations

import asyncio
import time

from services.target.engine import Engine
from services.target.requests.event_stream import EventStream
from services.target.requests.request import Failed, Finished, GenerationRequest
from shared.tokens import SamplingParams, StopParams

_NUM_OUTPUT_TOKENS = 2


def warm_up_tokens(engine: Engine, chunk_tokens: int) -> int:
    """Returns the tokens of the prompt to warm up with: on a GPU as many as a step may compute, so
    that kernels for prompts are loaded and memory for them is there, or is found missing now."""
    if engine.device.type != "cuda":
        return 1
    return max(1, min(chunk_tokens, engine.limits.max_sequence_tokens - _NUM_OUTPUT_TOKENS))


async def warm_up(engine: Engine, num_prompt_tokens: int) -> None:
    """Generates two tokens: a prompt's step and a decode step. Nothing of it stays cached.

    Raises:
        OutriderError: the engine cannot serve.
    """
    await _generate(engine, num_prompt_tokens)
    await asyncio.wrap_future(engine.flush_prefix_cache())


async def _generate(engine: Engine, num_prompt_tokens: int) -> None:
    stream = EventStream(asyncio.get_running_loop())
    request = GenerationRequest(
        request_id="warm-up",
        prompt_token_ids=(0,) * num_prompt_tokens,
        sampling=SamplingParams(temperature=1.0),
        stop=StopParams(_NUM_OUTPUT_TOKENS, ignore_eos=True),
        arrival_s=time.monotonic(),
    )
    engine.submit(request, stream, 0)
    while True:
        for _, event in await stream.next_batch():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                return
