"""`llama-index`, by its OpenAI-like model: completions, chats, streams, and typed output."""

from __future__ import annotations

import os
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    """What is asked for, and nothing else: a model this small would not come to an end."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["capital", "village"]


def main() -> None:
    model = OpenAILike(
        model="demo",
        api_base=os.environ["OUTRIDER_URL"] + "/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=512,
        max_tokens=160,
        temperature=0.0,
    )
    messages = [ChatMessage(role="user", content="What is the capital of France?")]
    whole = model.chat(messages).message.content
    assert whole
    assert "".join(each.delta or "" for each in model.stream_chat(messages)) == whole
    assert model.complete("The capital of France is").text
    prompt = PromptTemplate("What is {name}?")
    typed = model.structured_predict(City, prompt, name="Paris")
    assert typed.kind in ("capital", "village")
    print("completions, chats, a stream, typed output")


if __name__ == "__main__":
    main()
