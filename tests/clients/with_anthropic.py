"""The `anthropic` package: messages, whole and streamed, token counts and errors."""

from __future__ import annotations

import os

import anthropic
import pytest

MESSAGE = {
    "model": "demo",
    "max_tokens": 16,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "extra_body": {"temperature": 0.0},
}


def main() -> None:
    client = anthropic.Anthropic(base_url=os.environ["OUTRIDER_URL"], api_key="none", max_retries=0)
    whole = client.messages.create(**MESSAGE)
    [block] = whole.content
    assert whole.role == "assistant"
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(**MESSAGE) as stream:
        assert "".join(stream.text_stream) == block.text
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(
        **{name: MESSAGE[name] for name in ("model", "system", "messages")}
    )
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**MESSAGE, "max_tokens": 0})


if __name__ == "__main__":
    main()
