"""How many tokens are reasoning, however steps and tokens cut the text."""

from __future__ import annotations

import pytest

from gateway.output.parser import Format, OutputParser, harmony, text_only, thinking

THINKING = thinking(text_only, starts_inside=False)
INSIDE = thinking(text_only, starts_inside=True)
HARMONY = (
    *("<|channel|>", "analysis", "<|message|>", "a", " b", "<|end|>", "<|start|>", "assistant"),
    *("<|channel|>", "final", "<|message|>", "yes"),
)


@pytest.mark.parametrize(
    ("output_format", "tokens", "num_reasoning"),
    [
        (THINKING, ("<think>", "a", " b", "</think>", "yes", " no"), 3),
        (THINKING, ("<thi", "nk>a", " b", "</", "thi", "nk>", "yes"), 5),
        (THINKING, ("<think>a</think>", "yes"), 1),
        (THINKING, ("yes", " <think>", "no"), 0),
        (INSIDE, ("a", "", " b", "</think>", "yes"), 4),  # half a character has no text
        (INSIDE, ("a", " b", "</th"), 3),
        (harmony, HARMONY, 8),  # to the header of the next channel
    ],
)
def test_the_cut_into_steps_changes_no_count(
    output_format: Format, tokens: tuple[str, ...], num_reasoning: int
) -> None:
    for per_step in range(1, len(tokens) + 1):
        parser = OutputParser(output_format, lambda: "call")
        for start in range(0, len(tokens), per_step):
            parser.push_tokens(tokens[start : start + per_step])
        assert parser.num_reasoning_tokens == num_reasoning, per_step
