"""litellm, by its OpenAI-compatible provider: whole, streamed, and its mapping of errors."""

from __future__ import annotations

import os

import litellm
import pytest

CALL = {
    "model": "openai/demo",
    "api_base": os.environ["OUTRIDER_URL"] + "/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
    "temperature": 0.0,
}


def main() -> None:
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    whole = litellm.completion(**CALL)
    text = whole.choices[0].message.content
    assert text
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**CALL, stream=True)
    )
    assert streamed == text
    long = [{"role": "user", "content": "a " * 200_000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**CALL, "messages": long})


if __name__ == "__main__":
    main()
