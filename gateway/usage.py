"""Token counts and speculation figures, in the shapes that clients and load tools read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from gateway.choice import Choice
from gateway.plan import Plan


def usage(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns OpenAI's `usage`.

    A prompt counts once, whatever `n`; its cached tokens are those of its first choice.
    """
    num_prompt_tokens = plan.num_prompt_tokens
    num_output_tokens = sum(choice.num_output_tokens for choice in choices)
    num_cached = sum(choice.num_cached_tokens for choice in choices[:: plan.num_choices])
    stats = [choice.stats for choice in choices]
    details: dict[str, int] = {
        "accepted_prediction_tokens": sum(choice.num_accepted for choice in choices),
        "rejected_prediction_tokens": sum(s.num_drafted - s.num_accepted for s in stats),
        "reasoning_tokens": sum(choice.num_reasoning_tokens for choice in choices),
    }
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": details,
        "reasoning_tokens": details["reasoning_tokens"],  # SGLang's place for it
    }


def usage_of_prompt(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns `usage` before anything of the output is told, though some of it may be there."""
    whole = usage(plan, choices)
    return {
        **whole,
        "completion_tokens": 0,
        "total_tokens": whole["prompt_tokens"],
        "completion_tokens_details": dict.fromkeys(whole["completion_tokens_details"], 0),
        "reasoning_tokens": 0,
    }


def metrics(choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns the root `metrics` object, summed over the choices.

    Its fields are the ones vLLM reports and AIPerf reads; times from the first choice to begin to
    the last to end. `speculative_decoding` is null when no tree was verified.
    """
    begun_s, first_s = min(choice.begun_s for choice in choices), _first_s(choices)
    generation_ms = 1e3 * (max(choice.ended_s for choice in choices) - first_s)
    num_later = max(choice.num_output_tokens for choice in choices) - 1
    num_tokens = sum(choice.num_output_tokens for choice in choices)
    return {
        "queue_time_ms": 1e3 * (min(choice.started_s for choice in choices) - begun_s),
        "time_to_first_token_ms": 1e3 * (first_s - begun_s),
        "generation_time_ms": generation_ms,
        **({"mean_itl_ms": generation_ms / num_later} if num_later > 0 else {}),
        "tokens_per_second": 1e3 * num_tokens / generation_ms if generation_ms else 0.0,
        "speculative_decoding": speculative_decoding(choices),
    }


def _first_s(choices: Sequence[Choice]) -> float:
    """Returns when the first token of any choice came."""
    return min(choice.ended_s if choice.first_s is None else choice.first_s for choice in choices)


def timings(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns llama.cpp's `timings`, in milliseconds; of several choices from the first token of
    any to the last of all. The prompt's begin when it has left the target's queue."""
    first_s = _first_s(choices)
    prompt_ms = 1e3 * (first_s - min(choice.started_s for choice in choices))
    predicted_ms = 1e3 * (max(choice.ended_s for choice in choices) - first_s)
    num_cached = sum(choice.num_cached_tokens for choice in choices[:: plan.num_choices])
    num_computed = plan.num_prompt_tokens - num_cached
    num_predicted = sum(choice.num_output_tokens for choice in choices)
    stats = [choice.stats for choice in choices]
    return {
        "queue_ms": 1e3 * min(choice.started_s - choice.begun_s for choice in choices),
        "cache_n": num_cached,
        "prompt_n": num_computed,
        "prompt_ms": prompt_ms,
        "prompt_per_second": 1e3 * num_computed / prompt_ms if prompt_ms else 0.0,
        "predicted_n": num_predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_second": 1e3 * num_predicted / predicted_ms if predicted_ms else 0.0,
        "draft_n": sum(each.num_drafted for each in stats),
        "draft_n_accepted": sum(each.num_accepted for each in stats),
    }


def speculative_decoding(choices: Sequence[Choice]) -> dict[str, Any] | None:
    """Returns the speculation figures, or None when there are none to tell."""
    stats = [choice.stats for choice in choices]
    num_rounds = sum(each.num_verified_rounds for each in stats)
    if num_rounds == 0:
        return None
    num_accepted = sum(each.num_accepted for each in stats)
    num_drafted = sum(each.num_drafted for each in stats)
    histogram = [sum(counts) for counts in zip_longest(*(s.histogram for s in stats), fillvalue=0)]
    return {
        # Tokens a verified round commits, the bonus token included.
        "mean_acceptance_length": 1 + num_accepted / num_rounds,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        # Element n counts the rounds that accepted n nodes.
        "acceptance_histogram": histogram,
        "num_spec_steps": num_rounds,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        # The wire carries no tree depth; the deepest path that was accepted is its lower bound.
        # AIPerf takes the histogram only when it has one element more than this.
        "num_spec_tokens": len(histogram) - 1,
    }
