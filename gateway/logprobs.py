"""Log probabilities in the two shapes OpenAI has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.choice import TokenScore
from shared.text.tokenizer import Tokenizer

_LEAST = -9999.0  # what OpenAI sends for minus infinity, which JSON cannot say


def chat_logprobs(scores: Sequence[TokenScore], tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns `logprobs` of a chat choice."""
    content = [
        {
            **_entry(score.token_id, score.logprobs.log_prob, tokenizer),
            "top_logprobs": [
                _entry(token_id, log_prob, tokenizer) for token_id, log_prob in score.logprobs.top
            ],
        }
        for score in scores
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    scores: Sequence[TokenScore], tokenizer: Tokenizer, *, echo_length: int
) -> dict[str, Any]:
    """Returns `logprobs` of a completion choice.

    Args:
        echo_length: characters of echoed prompt before the output.
    """
    return {
        "tokens": [_spelling(score.token_id, tokenizer) for score in scores],
        "token_logprobs": [finite(score.logprobs.log_prob) for score in scores],
        "top_logprobs": [_top(score, tokenizer) for score in scores],
        "text_offset": [echo_length + score.offset for score in scores],
    }


def _entry(token_id: int, log_prob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    token_bytes = tokenizer.token_bytes.get(token_id, b"")
    return {
        "token": token_bytes.decode("utf-8", "replace"),
        "logprob": finite(log_prob),
        "bytes": list(token_bytes),
    }


def _top(score: TokenScore, tokenizer: Tokenizer) -> dict[str, float]:
    """Returns the most probable tokens, and the drawn one even when it is not among them."""
    top: dict[str, float] = {}
    for token_id, log_prob in (*score.logprobs.top, (score.token_id, score.logprobs.log_prob)):
        # Two tokens may be spelled alike; the more probable one comes first.
        top.setdefault(_spelling(token_id, tokenizer), finite(log_prob))
    return top


def _spelling(token_id: int, tokenizer: Tokenizer) -> str:
    """Returns a token as the completions interface writes it: `bytes:\\xe2\\x80` for a fragment."""
    token_bytes = tokenizer.token_bytes.get(token_id, b"")
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def finite(log_prob: float) -> float:
    """Returns what JSON can say of a log probability."""
    return max(log_prob, _LEAST)
