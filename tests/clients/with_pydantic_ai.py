"""`pydantic-ai`: an agent with a tool by chats, responses and messages, and typed output."""

from __future__ import annotations

import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.with_agents import LAST_WORDS, SECRET


class Animal(BaseModel):
    """What the script answers where JSON is asked for."""

    name: str
    legs: int


def _scribe(model: Model) -> tuple[Agent[None, str], list[str]]:
    """Returns an agent with a tool, and what the tool was given."""
    notes: list[str] = []
    agent = Agent(model)

    @agent.tool_plain
    def note(text: str) -> str:
        """Writes something down."""
        notes.append(text)
        return "done"

    return agent, notes


def main() -> None:
    url = os.environ["OUTRIDER_SCRIPTED_URL"]
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    anthropic = AnthropicProvider(base_url=url, api_key="none")
    models = (
        OpenAIChatModel("demo", provider=openai),
        OpenAIResponsesModel("demo", provider=openai),
        AnthropicModel("demo", provider=anthropic),
    )
    for model in models:
        agent, notes = _scribe(model)
        assert agent.run_sync("Note something of a fox.").output == LAST_WORDS
        with agent.run_stream_sync("Note something of a fox.") as streamed:
            assert streamed.get_output() == LAST_WORDS
        assert notes == [SECRET] * 2, notes
    typed = Agent(models[0], output_type=NativeOutput(Animal))
    assert typed.run_sync("A fox, as JSON.").output == Animal(name="fox", legs=4)
    print("a tool by three interfaces, typed output")


if __name__ == "__main__":
    main()
