"""Log probabilities of prompt tokens, in the shapes that clients know."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from gateway.choice import Choice, TokenScore
from gateway.logprobs import completion_logprobs, finite
from shared.text.detokenizer import Detokenizer
from shared.text.tokenizer import Tokenizer


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
