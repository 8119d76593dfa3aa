"""Choices with all of their output, and which of them are the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.choice import Choice, Piece
from gateway.plan import Plan


@dataclass(frozen=True, slots=True)
class FinalChoice:
    """A choice with all of its output.

    Attributes:
        index: its number in the answer.
    """

    choice: Choice
    piece: Piece
    index: int

    @property
    def finish_reason(self) -> str:
        name = self.choice.finish_name
        assert name is not None, "a response is built when all is finished"
        return name


def best_choices(plan: Plan, final_choices: Sequence[FinalChoice]) -> Sequence[FinalChoice]:
    """Returns the `n` best of the `best_of` choices of each prompt, best first, numbered anew.

    The best are those whose tokens the model finds likeliest on average.
    """
    num_drawn, num_shown = plan.num_choices, plan.num_shown
    if num_drawn == num_shown:
        return final_choices
    best: list[FinalChoice] = []
    for start in range(0, len(final_choices), num_drawn):
        own = sorted(final_choices[start : start + num_drawn], key=_mean_log_prob, reverse=True)
        best += own[:num_shown]
    return [replace(final_choice, index=index) for index, final_choice in enumerate(best)]


def check_field(choice: Choice) -> dict[str, Any]:
    """Returns whether a choice keeps to its schema, where that had to be checked."""
    return {} if choice.schema_check is None else {"schema_check": choice.schema_check}


def stop_fields(plan: Plan, choice: Choice) -> dict[str, Any]:
    """Returns what ended a choice: vLLM's `stop_reason`, null at the model's own end, and SGLang's
    `matched_stop`, which names that token too."""
    token_id = choice.stop_token_id
    asked = plan.generations[choice.index].stop.stop_token_ids
    reason = token_id if token_id in asked else None
    matched = choice.matched_stop
    if matched is not None:
        return {"stop_reason": matched, "matched_stop": matched} | check_field(choice)
    return {"stop_reason": reason, "matched_stop": token_id} | check_field(choice)


def _mean_log_prob(final_choice: FinalChoice) -> float:
    scores = final_choice.piece.scores
    return sum(score.logprobs.log_prob for score in scores) / max(len(scores), 1)
