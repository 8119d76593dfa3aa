"""Log probabilities in the two shapes OpenAI has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.choice import TokenScore
from shared.text.tokenizer import Tokenizer

_LEAST = -9999.0  # what OpenAI sends for minus infinity, which JSON cannot say


def chat_logprobs(
    scores: Sequence[TokenScore],
    tokenizer: Tokenizer,
    *,
    as_ids: bool = False,
    with_drawn: bool = False,
) -> dict[str, Any]:
    """Returns `logprobs` of a chat choice.

    Args:
        as_ids: tokens are named by their ids.
        with_drawn: the drawn token stands before the others, which a request named.
    """
    content = []
    for score in scores:
        drawn = (score.token_id, score.logprobs.log_prob)
        top = score.logprobs.top
        if with_drawn:
            top = (drawn, *(each for each in top if each[0] != score.token_id))
        content.append(
            {
                **_entry(*drawn, tokenizer, as_ids),
                "top_logprobs": [_entry(*each, tokenizer, as_ids) for each in top],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    scores: Sequence[TokenScore],
    tokenizer: Tokenizer,
    *,
    echo_length: int,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Returns `logprobs` of a completion choice.

    Args:
        echo_length: characters of echoed prompt before the output.
        as_ids: tokens are named by their ids.
    """
    return {
        "tokens": [_spelling(score.token_id, tokenizer, as_ids) for score in scores],
        "token_logprobs": [finite(score.logprobs.log_prob) for score in scores],
        "top_logprobs": [_top(score, tokenizer, as_ids) for score in scores],
        "text_offset": [echo_length + score.offset for score in scores],
    }


def _entry(token_id: int, log_prob: float, tokenizer: Tokenizer, as_ids: bool) -> dict[str, Any]:
    token_bytes = tokenizer.token_bytes.get(token_id, b"")
    return {
        "token": f"token_id:{token_id}" if as_ids else token_bytes.decode("utf-8", "replace"),
        "logprob": finite(log_prob),
        "bytes": list(token_bytes),
    }


def _top(score: TokenScore, tokenizer: Tokenizer, as_ids: bool) -> dict[str, float]:
    """Returns the drawn token first, as vLLM does, and the most probable ones."""
    top: dict[str, float] = {}
    for token_id, log_prob in ((score.token_id, score.logprobs.log_prob), *score.logprobs.top):
        # Two tokens may be spelled alike; the more probable one counts.
        word = _spelling(token_id, tokenizer, as_ids)
        top[word] = max(top.get(word, _LEAST), finite(log_prob))
    return top


def _spelling(token_id: int, tokenizer: Tokenizer, as_ids: bool) -> str:
    """Returns a token as the completions interface writes it: `bytes:\\xe2\\x80` for a fragment."""
    if as_ids:
        return f"token_id:{token_id}"
    token_bytes = tokenizer.token_bytes.get(token_id, b"")
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def finite(log_prob: float) -> float:
    """Returns what JSON can say of a log probability."""
    return max(log_prob, _LEAST)
