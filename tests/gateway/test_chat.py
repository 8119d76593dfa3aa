"""`/v1/chat/completions` as the openai client sees it."""

from __future__ import annotations

from openai import AsyncOpenAI

from gateway.text.tokenizer import Tokenizer
from tests.helpers.fake_target import FakeTarget

MESSAGES = [{"role": "user", "content": "then"}]
PROMPT = "<|user|>then<|end|><|assistant|>"


async def say(target: FakeTarget, tokenizer: Tokenizer, text: str, *, per_step: int = 3) -> None:
    """Makes the target answer `text` and end."""
    ids = [*await tokenizer.encode(text, add_special_tokens=False), 0]
    steps = [ids[i : i + per_step] for i in range(0, len(ids), per_step)]
    target.reply = lambda request: steps


async def test_a_whole_answer_carries_text_usage_and_finish_reason(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "héllo 🦊 fox")
    answer = await openai_client.chat.completions.create(model="fake", messages=MESSAGES)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("héllo 🦊 fox", "stop")
    prompt = await tokenizer.encode(PROMPT, add_special_tokens=False)
    assert target.submits[0].request.prompt_token_ids == prompt
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    output = await tokenizer.encode("héllo 🦊 fox", add_special_tokens=False)
    assert answer.usage.completion_tokens == len(output) + 1
