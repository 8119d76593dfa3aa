"""Log probabilities of output and prompt tokens, in OpenAI's and vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from gateway.choice import Choice, TokenScore
from gateway.planner import Plan
from shared.text import Detokenizer, Tokenizer

_MIN_LOG_PROB = -9999.0  # OpenAI's value for minus infinity, which JSON cannot express


def chat_logprobs(
    plan: Plan, scores: Sequence[TokenScore], tokenizer: Tokenizer
) -> dict[str, Any] | None:
    """Returns `logprobs` of a piece of a chat; None without scores. Where the request names tokens,
    the drawn token comes before them."""
    if not scores:
        return None
    content, as_ids = [], plan.tokens_as_ids
    for score in scores:
        drawn = (score.token_id, score.logprobs.log_prob)
        top = score.logprobs.top
        if plan.names_scored_tokens:
            top = (drawn, *(named for named in top if named[0] != score.token_id))
        content.append(
            {
                **_entry(*drawn, tokenizer, as_ids),
                "top_logprobs": [_entry(*scored, tokenizer, as_ids) for scored in top],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    plan: Plan, choice: Choice, scores: Sequence[TokenScore], tokenizer: Tokenizer
) -> dict[str, Any] | None:
    """Returns `logprobs` of a piece of a completion; None without scores."""
    echo_length = len(plan.echoed_text_of(choice.index))
    return _columns(plan, scores, tokenizer, echo_length) if scores else None


def _columns(
    plan: Plan, scores: Sequence[TokenScore], tokenizer: Tokenizer, echo_length: int
) -> dict[str, Any]:
    """Args:
    echo_length: characters of echoed prompt before the tokens.
    """
    as_ids = plan.tokens_as_ids
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
    """Returns the drawn token first, as vLLM does, and then the most probable tokens."""
    top: dict[str, float] = {}
    for token_id, log_prob in ((score.token_id, score.logprobs.log_prob), *score.logprobs.top):
        # Two tokens may have the same spelling; the more probable one is shown.
        word = _spelling(token_id, tokenizer, as_ids)
        top[word] = max(top.get(word, _MIN_LOG_PROB), finite(log_prob))
    return top


def _spelling(token_id: int, tokenizer: Tokenizer, as_ids: bool) -> str:
    """Returns a token's text in the completions interface: `bytes:\\xe2\\x80` for a fragment."""
    if as_ids:
        return f"token_id:{token_id}"
    token_bytes = tokenizer.token_bytes.get(token_id, b"")
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def finite(log_prob: float) -> float:
    """Returns a log probability that JSON can express."""
    return max(log_prob, _MIN_LOG_PROB)


def echoed_logprobs(
    plan: Plan, choice: Choice, scores: Sequence[TokenScore], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns `logprobs` of an echoed prompt, null for its first token, and of the output after it.

    Args:
        scores: scores of the output; empty in a stream's echo chunk.
    """
    prompt = plan.generations[choice.index].prompt_token_ids
    echo_length = len(plan.echoed_text_of(choice.index))
    offsets = _offsets(prompt, tokenizer, echo_length)
    prompt_scores = [
        TokenScore(token_id, offset, logprobs)
        for token_id, offset, logprobs in zip(
            prompt[1:], offsets[1:], choice.prompt_scores, strict=True
        )
    ]
    rest = _columns(plan, prompt_scores, tokenizer, 0)
    output = _columns(plan, scores, tokenizer, echo_length)
    begin = tokenizer.decode(prompt[:1], skip_special_tokens=False)
    first = {"tokens": f"token_id:{prompt[0]}" if plan.tokens_as_ids else begin, "text_offset": 0}
    return {key: [first.get(key), *rest[key], *output[key]] for key in rest}


def vllm_prompt_logprobs(
    plan: Plan, choice: Choice, tokenizer: Tokenizer
) -> list[dict[str, Any] | None] | None:
    """Returns `prompt_logprobs`: for each prompt token, log probabilities by id of the token and of
    the likeliest ones. None where the request does not ask for them."""
    if not plan.shows_prompt_logprobs:
        return None
    prompt = plan.generations[choice.index].prompt_token_ids
    by_token: list[dict[str, Any] | None] = [None]
    for token_id, logprobs in zip(prompt[1:], choice.prompt_scores, strict=True):
        ranked = [(i, value, rank) for rank, (i, value) in enumerate(logprobs.top, start=1)]
        entries = [(token_id, logprobs.log_prob, logprobs.rank), *ranked]
        by_token.append(
            {
                str(i): {
                    "logprob": finite(value),
                    "rank": rank,
                    "decoded_token": tokenizer.decode([i], skip_special_tokens=False),
                }
                for i, value, rank in entries
            }
        )
    return by_token


def _offsets(prompt: Sequence[int], tokenizer: Tokenizer, echo_length: int) -> list[int]:
    """Returns the number of echoed characters before each token. Text that the tokenizer adds in
    front, such as a begin-of-sequence token, is not echoed and does not count."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    ends = list(accumulate(len(detokenizer.push((token_id,))) for token_id in prompt))
    num_added = ends[-1] + len(detokenizer.flush()) - echo_length
    return [max(end - num_added, 0) for end in [0, *ends[:-1]]]
