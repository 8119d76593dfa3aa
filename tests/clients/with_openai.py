"""The `openai` package: chats, completions and responses, whole and streamed, and its errors."""

from __future__ import annotations

import asyncio
import os

import openai
import pytest

BASE_URL = os.environ["OUTRIDER_URL"] + "/v1"
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
    "temperature": 0.0,
}


def main() -> None:
    client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
    assert "demo" in [model.id for model in client.models.list()]

    whole = client.chat.completions.create(**CHAT)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.total_tokens > whole.usage.prompt_tokens

    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**CHAT, **options))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == text
    # How much of it was drafted is another matter each time.
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens

    several = client.chat.completions.create(**{**CHAT, "n": 2, "temperature": 1.0, "seed": 7})
    assert [choice.index for choice in several.choices] == [0, 1]

    scored = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    tokens = scored.choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)

    completion = client.completions.create(
        model="demo", prompt=["one", "two"], max_tokens=4, temperature=0
    )
    assert len(completion.choices) == 2

    response = client.responses.create(
        model="demo", input="Name a colour.", max_output_tokens=16, store=False
    )
    assert isinstance(response.output_text, str)
    with client.responses.stream(
        model="demo", input="Name a colour.", max_output_tokens=16, store=False
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")

    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**CHAT, "temperature": 9.0})
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**CHAT, "model": "nobody"})
    asyncio.run(_side_by_side(text))


async def _side_by_side(text: str) -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none") as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**CHAT) for _ in range(8)))
    assert {answer.choices[0].message.content for answer in answers} == {text}


if __name__ == "__main__":
    main()
