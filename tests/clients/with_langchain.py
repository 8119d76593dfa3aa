"""langchain-openai: a chain, a stream and a batch."""

from __future__ import annotations

import os

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main() -> None:
    model = ChatOpenAI(
        model="demo",
        base_url=os.environ["OUTRIDER_URL"] + "/v1",
        api_key="none",
        temperature=0,
        max_tokens=16,
    )
    chain = (
        ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")]) | model
    )
    answer = chain.invoke({"country": "France"})
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    streamed = "".join(chunk.content for chunk in chain.stream({"country": "France"}))
    assert streamed == answer.content
    batch = chain.batch([{"country": "France"}, {"country": "Italy"}])
    assert batch[0].content == answer.content
    assert len(batch) == 2


if __name__ == "__main__":
    main()
