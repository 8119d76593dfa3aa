"""A first generation, so that the first client does not pay for lazy set-up."""

from __future__ import annotations

import asyncio
import time

from services.target.engine import Engine
from services.target.requests.event_stream import EventStream
from services.target.requests.request import Failed, Finished, GenerationRequest
from shared.tokens import SamplingParams, StopParams


async def warm_up(engine: Engine) -> None:
    """Generates two tokens: a prompt's step and a decode step.

    Raises:
        OutriderError: the engine cannot serve.
    """
    stream = EventStream(asyncio.get_running_loop())
    request = GenerationRequest(
        request_id="warm-up",
        prompt_token_ids=(0,),
        sampling=SamplingParams(temperature=1.0),
        stop=StopParams(2, ignore_eos=True),
        arrival_s=time.monotonic(),
    )
    engine.submit(request, stream, 0)
    while True:
        for _, event in await stream.next_batch():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                return
