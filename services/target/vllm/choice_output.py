"""One of the `n` outputs of a request, as it grows."""

from __future__ import annotations

from dataclasses import replace

from services.target.requests.request import (
    Delta,
    Event,
    Finished,
    GenerationRequest,
    PromptScored,
    SpeculationStats,
    Started,
)
from services.target.vllm.text_stop import TextStop
from shared.tokens import FinishReason, TokenLogprobs


class ChoiceOutput:
    """Collects the events of one output, and ends it at a stop string.

    Attributes:
        token_ids: up to and including the one that ended it.
        logprobs: one for each token, or none.
        prompt_scores: of the prompt's tokens from the second on; all of them are there before the
            first token of output.
        finished: None while it runs.
        num_drafted: draft nodes verified.
        num_accepted: draft tokens in the output.
    """

    def __init__(self, index: int, request: GenerationRequest, stop: TextStop | None) -> None:
        self.index = index
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_scores: list[TokenLogprobs] = []
        self.num_cached_tokens = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.finished: Finished | None = None
        self._stop = stop

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return None if self._stop is None else self._stop.matched

    def push(self, event: Event) -> Event:
        """Takes an event; returns it, with the tokens after a stop string left out."""
        assert self.finished is None
        if isinstance(event, Delta):
            return self._add(event)
        if isinstance(event, Started):
            self.num_cached_tokens = event.num_cached_tokens
        elif isinstance(event, PromptScored):
            self.prompt_scores.extend(event.logprobs)
        elif isinstance(event, Finished):
            self.finished = event
        return event

    def end(self, reason: FinishReason) -> None:
        """Ends the output before the engine does."""
        self.finished = Finished(
            reason=reason,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=len(self.token_ids),
            num_cached_tokens=self.num_cached_tokens,
            stop_token_id=None,
            stats=SpeculationStats(),
        )

    def _add(self, delta: Delta) -> Delta:
        if self._stop is not None:
            delta = _cut(delta, self._stop.take(delta.token_ids))
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.num_drafted += delta.num_drafted
        self.num_accepted += delta.num_accepted
        if self.stop_string is not None:
            self.end(FinishReason.STOP)
        return delta


def _cut(delta: Delta, num_tokens: int) -> Delta:
    if num_tokens == len(delta.token_ids):
        return delta
    return replace(
        delta,
        token_ids=delta.token_ids[:num_tokens],
        logprobs=delta.logprobs[:num_tokens],
        num_accepted=min(delta.num_accepted, num_tokens),
    )
