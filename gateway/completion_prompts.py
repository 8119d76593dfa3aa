"""The prompts of a completion: strings or token ids, one or many."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.generation import TargetModel
from gateway.schema import CompletionRequest, GenerationBody
from shared.errors import InvalidArgument
from shared.text.tokenizer import Tokenizer


def given_prompts(body: CompletionRequest) -> Sequence[str | list[int]]:
    """Returns the prompts as they were sent: a list of numbers is one prompt, not many."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token_id for token_id in prompt if isinstance(token_id, int)]]
    return [item for item in prompt if not isinstance(item, int)]


async def prompt_tokens(
    prompt: str | list[int], body: CompletionRequest, model: TargetModel, tokenizer: Tokenizer
) -> list[int]:
    """Returns the token ids of one prompt.

    Raises:
        InvalidArgument: the text is too long, or an id is not in the vocabulary.
    """
    if isinstance(prompt, str):
        add_special_tokens = body.add_special_tokens is not False
        return await tokenizer.encode(
            prompt,
            add_special_tokens=add_special_tokens,
            max_tokens=longest_prompt(body, model),
        )
    longest = longest_prompt(body, model)
    if longest is not None and len(prompt) > longest:
        raise InvalidArgument.prompt_too_long(len(prompt), longest)
    check_token_ids("prompt", prompt, model)
    return prompt


def check_token_ids(field: str, prompt: Sequence[int], model: TargetModel) -> None:
    """Raises:
    InvalidArgument: an id is not in the vocabulary.
    """
    for token_id in (min(prompt, default=0), max(prompt, default=0)):
        if not 0 <= token_id < model.vocab_size:
            message = f"{field} holds token {token_id}; ids must be in [0, {model.vocab_size})"
            raise InvalidArgument.of("TOKEN_OUT_OF_RANGE", field, message)


def longest_prompt(body: GenerationBody, model: TargetModel) -> int | None:
    """Returns the tokens a prompt may have; None where what is too long is cut."""
    return model.max_context_tokens - 1 if body.truncate_prompt_tokens is None else None


def truncated(
    prompt: list[int], body: GenerationBody, model: TargetModel, max_tokens: int | None
) -> list[int]:
    """Returns the end of a prompt that `truncate_prompt_tokens` leaves, or its begin.

    Args:
        max_tokens: of the output, which -1 leaves room for; None is room for one.

    Raises:
        InvalidArgument: it asks for none, or for more than the context holds.
    """
    num_kept, limit = body.truncate_prompt_tokens, model.max_context_tokens - 1
    if num_kept is None:
        return prompt
    if num_kept == -1:
        num_kept = max(limit + 1 - (max_tokens or 1), 1)
    if not 1 <= num_kept <= limit:
        raise InvalidArgument.out_of_range(
            "truncate_prompt_tokens", num_kept, f"-1 or in [1, {limit}]"
        )
    return prompt[:num_kept] if body.truncation_side == "right" else prompt[-num_kept:]


def echoed_texts(
    body: CompletionRequest, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> tuple[str, ...]:
    """Returns what `echo` puts before the outputs: strings as they were sent, and for token ids
    the text they stand for. Empty without `echo`."""
    if not body.echo:
        return ()
    return tuple(
        prompt
        if isinstance(prompt, str)
        else tokenizer.decode(token_ids, skip_special_tokens=False)
        for prompt, token_ids in zip(given_prompts(body), prompts, strict=True)
    )
