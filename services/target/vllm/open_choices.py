"""The `n` outputs (choices) of one request, from their submission until all have ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace

from services.target.requests.admission import Admission, OpenRequests
from services.target.requests.request import Event, Finished, GenerationRequest
from shared.errors import OutriderError
from shared.generation import Delta, Failed, PromptScored, SpeculationStats, Started
from shared.text import Detokenizer, StopStrings, Tokenizer
from shared.tokens import FinishReason, TokenLogprobs


class TextStop:
    """Finds the token of an output that completes a stop string.

    Tokens are checked one by one, so that the end of an output does not depend on the number of
    tokens that a step commits.

    Args:
        silent_token_ids: tokens that end generation; they have no text.
        num_ignored: first tokens of the output, whose text cannot be part of a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        *,
        skip_special_tokens: bool,
        silent_token_ids: Collection[int],
        num_ignored: int,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stop_strings)
        self._silent_token_ids = silent_token_ids
        self._num_ignored = num_ignored

    @property
    def matched(self) -> str | None:
        """The stop string that was completed, if any."""
        return self._stops.matched

    def take(self, token_ids: Sequence[int]) -> int:
        """Takes the next tokens; returns how many belong to the output: those up to the token that
        completes a stop string, else all."""
        for number, token_id in enumerate(token_ids, start=1):
            text = ""
            if token_id not in self._silent_token_ids:
                text = self._detokenizer.push((token_id,))
            if self._num_ignored > 0:
                self._num_ignored -= 1
                continue
            self._stops.push(text)
            if self._stops.matched is not None:
                return number
        return len(token_ids)


class ChoiceOutput:
    """Collects the events of one output, and ends it at a stop string.

    Attributes:
        token_ids: tokens so far, up to and including the one that ended the output.
        logprobs: one for each token; empty if not requested.
        prompt_scores: log probabilities of the prompt's tokens from the second on. All are there
            before the first token of the output.
        finished: None while the output runs.
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
        """The stop string that ended the output, if any."""
        return None if self._stop is None else self._stop.matched

    def push(self, event: Event) -> Event:
        """Takes an event; returns it without the tokens after a stop string."""
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


_ABORTED = Finished(FinishReason.CANCELLED, 0, 0, 0, None, SpeculationStats())


class OpenChoices(OpenRequests):
    """Runs the outputs concurrently, keyed by their index.

    Attributes:
        choices: empty before `submit`.
    """

    def __init__(self, admission: Admission) -> None:
        super().__init__(admission)
        self.choices: tuple[ChoiceOutput, ...] = ()
        self._is_aborted = False

    def submit(
        self, requests: Sequence[GenerationRequest], stops: Sequence[TextStop | None]
    ) -> None:
        """Submits the outputs to the engine; `begin` was called for each before.

        Raises:
            OutriderError: the engine refuses an output.
        """
        self.choices = tuple(
            ChoiceOutput(index, request, stop)
            for index, (request, stop) in enumerate(zip(requests, stops, strict=True))
        )
        if self._is_aborted:
            self.abort()
            return
        for choice in self.choices:
            self.admission.engine.submit(choice.request, self.stream, choice.index)

    async def outputs(self) -> AsyncIterator[tuple[ChoiceOutput, Delta | None]]:
        """Yields each output that changed, with the added tokens, until all have ended.

        Raises:
            OutriderError: an output failed.
        """
        while any(choice.finished is None for choice in self.choices):
            for key, event in await self.stream.next_batch():
                choice = self.choices[key]
                if choice.finished is None:
                    taken = self._taken(choice, event)
                    yield choice, taken if isinstance(taken, Delta) else None

    def abort(self) -> None:
        """Ends all outputs that still run; their tokens so far are kept."""
        self._is_aborted = True
        for choice in self.choices:
            if choice.finished is None:
                self.end(choice.index, _ABORTED)

    def fail(self, error: OutriderError) -> None:
        """Records the error that ends the request."""
        for record in self._records.values():
            record.fail(Failed(error))

    def _taken(self, choice: ChoiceOutput, event: Event) -> Event:
        if isinstance(event, Failed):
            raise event.error
        if event is _ABORTED:
            choice.end(FinishReason.CANCELLED)
            self.cancel(choice.index)
            return event
        taken = choice.push(event)
        self.take(choice.index, taken)
        if isinstance(taken, Delta) and choice.finished is not None:  # by a stop string
            self.take(choice.index, choice.finished)
            self.cancel(choice.index)
        return taken
