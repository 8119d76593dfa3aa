"""Log probabilities of tokens of the output and the prompt, in the shapes that clients know."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from gateway.choice import Choice, TokenScore
from shared.text import Detokenizer, Tokenizer

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


def echoed_logprobs(
    prompt: Sequence[int],
    choice: Choice,
    scores: Sequence[TokenScore],
    tokenizer: Tokenizer,
    *,
    echo_length: int,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Returns `logprobs` of a completion that echoes its prompt: null for the first token.

    Args:
        scores: of the output; empty in the chunk that is the echo.
        echo_length: characters of echoed prompt before the output.
        as_ids: tokens are named by their ids.
    """
    offsets = _offsets(prompt, tokenizer, echo_length)
    own = [
        TokenScore(token_id, offset, logprobs)
        for token_id, offset, logprobs in zip(
            prompt[1:], offsets[1:], choice.prompt_scores, strict=True
        )
    ]
    first = completion_logprobs([], tokenizer, echo_length=0)
    rest = completion_logprobs(own, tokenizer, echo_length=0, as_ids=as_ids)
    output = completion_logprobs(scores, tokenizer, echo_length=echo_length, as_ids=as_ids)
    begin = tokenizer.decode(prompt[:1], skip_special_tokens=False)
    nothing = {"tokens": f"token_id:{prompt[0]}" if as_ids else begin, "text_offset": 0}
    return {key: [nothing.get(key), *rest[key], *output[key]] for key in first}


def vllm_prompt_logprobs(
    prompt: Sequence[int], choice: Choice, tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """Returns `prompt_logprobs`: for each token those of itself and of the likeliest, by id."""
    found: list[dict[str, Any] | None] = [None]
    for token_id, logprobs in zip(prompt[1:], choice.prompt_scores, strict=True):
        ranked = [(i, value, rank) for rank, (i, value) in enumerate(logprobs.top, start=1)]
        entries = [(token_id, logprobs.log_prob, logprobs.rank), *ranked]
        found.append(
            {
                str(i): {
                    "logprob": finite(value),
                    "rank": rank,
                    "decoded_token": tokenizer.decode([i], skip_special_tokens=False),
                }
                for i, value, rank in entries
            }
        )
    return found


def _offsets(prompt: Sequence[int], tokenizer: Tokenizer, echo_length: int) -> list[int]:
    """Returns the characters of the echo before each token. What the tokenizer puts before a text,
    as a begin of sequence, has none."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    ends = list(accumulate(len(detokenizer.push((token_id,))) for token_id in prompt))
    num_put_before = ends[-1] + len(detokenizer.flush()) - echo_length
    return [max(end - num_put_before, 0) for end in [0, *ends[:-1]]]
