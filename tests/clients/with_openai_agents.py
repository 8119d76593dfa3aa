"""`openai-agents`: a run with a tool, by responses and by chats, whole and streamed, and a session
that continues by `previous_response_id`."""

from __future__ import annotations

import asyncio
import os

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.clients.with_agents import LAST_WORDS, SECRET

NOTES: list[str] = []


@function_tool
def note(text: str) -> str:
    """Writes something down."""
    NOTES.append(text)
    return "done"


async def main() -> None:
    set_tracing_disabled(True)
    url = os.environ["OUTRIDER_SCRIPTED_URL"]
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    for model in (OpenAIResponsesModel("demo", client), OpenAIChatCompletionsModel("demo", client)):
        agent = Agent("scribe", instructions="Take notes.", tools=[note], model=model)
        whole = await Runner.run(agent, "Note something of a fox.")
        assert whole.final_output == LAST_WORDS, whole.final_output
        streamed = Runner.run_streamed(agent, "Note something of a fox.")
        kinds = {event.type async for event in streamed.stream_events()}
        assert "raw_response_event" in kinds
        assert streamed.final_output == LAST_WORDS
    assert NOTES == [SECRET] * 4
    agent = Agent("scribe", model=OpenAIResponsesModel("demo", client))
    first = await Runner.run(agent, "Hello.", auto_previous_response_id=True)
    assert first.last_response_id is not None
    second = await Runner.run(agent, "And?", previous_response_id=first.last_response_id)
    assert second.final_output == LAST_WORDS
    print("a tool by two interfaces, a session by its id")


if __name__ == "__main__":
    asyncio.run(main())
