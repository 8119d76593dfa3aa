"""One choice of an answer: token deltas in, text pieces out, and the whole output at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gateway.generation import Finished, NodeBudget, round_fields
from gateway.output.parser import Content, OutputParser, Part, Reasoning
from gateway.planner import Plan, TextOptions
from gateway.sampling import StopPatterns
from gateway.schema_trial import Verdict
from shared.generation import Delta, SpeculationStats
from shared.text import Detokenizer, StopStrings, Tokenizer
from shared.tokens import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log probabilities of one token of the output.

    Attributes:
        offset: characters of output text before the token.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs


class Piece(NamedTuple):
    """Output that has not been sent yet. `text` may be shorter than the text of the tokens: the
    rest may be the beginning of a stop string, or half a character.

    A tuple: one is made for every choice and step, and a frozen dataclass costs twice as much.

    Attributes:
        text: text for the user, without parsed calls and reasoning.
        rounds: as JSON objects.
        parts: text, calls and reasoning in order; empty where all output is text.
    """

    text: str
    token_ids: Sequence[int] = ()
    scores: Sequence[TokenScore] = ()
    rounds: Sequence[dict[str, Any]] = ()
    parts: Sequence[Part] = ()


class Choice:
    """Turns the tokens of one generation into text and counts them.

    Attributes:
        finish_reason: None while the choice runs.
        num_output_tokens: tokens of the output. A stop string ends it at the token that completed
            the string, even where the step brought more tokens.
        num_accepted: how many of the output tokens are accepted draft tokens.
        prompt_scores: log probabilities of the prompt's tokens from the requested start on;
            complete before the first output token.
        matched_stop: the stop string, or the pattern as it was written, that ended the choice.
        stop_token_id: the token that ended the choice; None where a stop string did.
        begun_s, started_s, first_s, ended_s: times of the request, of leaving the target's queue,
            of the first and of the last token, by `time.perf_counter`.
        weight_spans: each weight version with the index of the first token drawn with it.
        schema_check: whether the output matches its schema, where a grammar enforces only part.
        stats: speculation counters of the steps so far. Counted here, because a generation that a
            stop string ends is cancelled and sends no last event.
    """

    def __init__(self, index: int, tokenizer: Tokenizer, options: TextOptions) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.num_output_tokens = 0
        self.num_accepted = 0
        self.num_cached_tokens = 0
        self.weight_spans: list[tuple[str, int]] = []
        self.prompt_scores: list[TokenLogprobs] = []
        self.stop_token_id: int | None = None
        self.routes = b""
        self.stats = SpeculationStats()
        self.begun_s = self.started_s = self.ended_s = time.perf_counter()
        self.first_s: float | None = None
        self._tokenizer = tokenizer
        self._options = options
        self._hidden_ids = options.hidden_token_ids
        output = options.output
        self._parser = None
        if output is not None:
            self._parser = OutputParser(output.format(), output.new_call_id, output.most_calls)
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            kept=() if output is None else output.kept_marks,
        )
        self.matched_stop: str | None = None
        self._stops: StopStrings | StopPatterns | None = None
        if options.stop_strings or options.stop_patterns:
            keeps_stop = options.include_stop
            self._stops = StopStrings(options.stop_strings, include_in_output=keeps_stop)
            if options.stop_patterns:
                self._stops = StopPatterns(
                    self._stops, options.stop_patterns, include_in_output=keeps_stop
                )
        self._is_token_wise = (
            self._stops is not None
            or options.with_logprobs
            or options.with_rounds
            or (output is not None and output.has_reasoning)
        )
        self._num_characters = 0
        self._texts: list[str] = []
        self._rest = ""  # what was held back until the end
        self._token_ids: list[int] = []
        self._scores: list[TokenScore] = []
        self._rounds: list[dict[str, Any]] = []
        self._nodes = NodeBudget()
        self._taken: list[Piece] = []
        self._last: Piece | None = None
        self._is_collected = False
        self.schema_check: Verdict | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of reasoning tokens among the tokens taken so far."""
        return 0 if self._parser is None else self._parser.num_reasoning_tokens

    @property
    def finish_name(self) -> str | None:
        """OpenAI's finish reason; None while the choice runs. Final only after the last `take`."""
        has_calls = self._parser is not None and self._parser.has_calls
        if self.finish_reason is FinishReason.STOP and has_calls:
            return "tool_calls"
        return None if self.finish_reason is None else self.finish_reason.value

    def push(self, delta: Delta) -> None:
        """Adds the tokens of one engine step."""
        if self._options.hides_output:
            return
        if self.first_s is None:
            self.first_s = time.perf_counter()
        if delta.weight_version is not None:
            self.weight_spans.append((delta.weight_version, self.num_output_tokens))
        if delta.num_drafted:
            self.stats.add_verified(delta.num_drafted, delta.num_accepted)
        if self._is_token_wise:
            self._push_token_wise(delta)
            return
        shown = token_ids = delta.token_ids
        # Only the last token can have ended the generation.
        if token_ids and token_ids[-1] in self._hidden_ids:
            shown = token_ids[:-1]
        self._texts.append(self._detokenizer.push(shown))
        self._token_ids += token_ids
        self.num_output_tokens += len(token_ids)
        self.num_accepted += delta.num_accepted

    def finish(self, event: Finished) -> None:
        """Ends the choice; text that was held back becomes output."""
        rest = self._detokenizer.flush()
        if rest:
            rest = self._up_to_stop(rest)
        if self._stops is not None and self.matched_stop is None:
            rest += self._stops.flush()
        self._rest = rest
        self.ended_s = time.perf_counter()
        stopped = self.matched_stop is not None
        self.finish_reason = FinishReason.STOP if stopped else event.reason
        if self._options.hides_output:
            self.finish_reason = FinishReason.LENGTH
        self.stop_token_id = None if stopped else event.stop_token_id
        self.num_cached_tokens = event.num_cached_tokens
        self.routes = event.routes

    def cut(self) -> Piece:
        """Returns the new output of an aborted choice, held-back text included."""
        held = "" if self._stops is None else self._stops.flush()
        text = "".join([*self._texts, held, self._detokenizer.flush()])
        return Piece(text, self._token_ids, self._scores, self._rounds)

    def take(self) -> Piece | None:
        """Returns the new output. None while there is no text: scores and token ids go with text.

        Rounds alone are returned without text: the playground shows them as they happen.
        """
        if self._is_collected:
            piece, self._last = self._last, None
            return piece
        parts: Sequence[Part] = ()
        if self._parser is None:
            text = "".join(self._texts) + self._rest
        else:
            parts = self._parsed(self._parser)
            text = "".join(part.text for part in parts if isinstance(part, Content))
        self._texts.clear()
        self._rest = ""
        if not (text or parts or self._rounds or (self.finish_reason and self._token_ids)):
            return None
        piece = Piece(text, self._token_ids, self._scores, self._rounds, parts)
        self._token_ids = []
        if self._is_token_wise:
            self._scores, self._rounds = [], []
            self._nodes.num_nodes = 0
        if self._options.keeps_output:
            self._taken.append(piece)
        return piece

    def take_text(self) -> str:
        """Returns the new text of a choice that still runs: a fast `take` where all output is text
        and nothing else is asked for."""
        text = "".join(self._texts)
        self._texts.clear()
        self._token_ids.clear()
        return text

    def whole_output(self) -> Piece:
        """Returns the whole output of an ended choice; the next `take` still returns its end."""
        if not self._is_collected:
            self._last = self.take()
            self._is_collected = True
        pieces = self._taken
        return Piece(
            "".join(piece.text for piece in pieces),
            [token_id for piece in pieces for token_id in piece.token_ids],
            [score for piece in pieces for score in piece.scores],
            [round_ for piece in pieces for round_ in piece.rounds],
            [part for piece in pieces for part in piece.parts],
        )

    def _parsed(self, parser: OutputParser) -> list[Part]:
        """Returns the parts of the new text."""
        parts = parser.push_tokens(self._texts)
        if self.finish_reason is not None:
            parts += parser.push(self._rest)  # no token's own, so that it counts as none
            parts += parser.flush()
        if self._options.include_reasoning:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]

    def _push_token_wise(self, delta: Delta) -> None:
        """Adds a step's tokens one by one: stop strings, scores, rounds and reasoning need the text
        of each token."""
        num_taken = self._push_tokens(delta)
        if delta.trace is not None:
            round_ = self._nodes.admit(delta.trace)
            texts = self._texts[-num_taken:]
            self._rounds.append(round_fields(delta, round_, texts, self._tokenizer))
        self._token_ids += delta.token_ids[:num_taken]
        self.num_output_tokens += num_taken
        self.num_accepted += min(delta.num_accepted, num_taken)

    def _up_to_stop(self, text: str) -> str:
        """Returns what can be sent of new text: it may end, or begin to end, in a stop string."""
        if self._stops is not None:
            text = self._stops.push(text)
            self.matched_stop = self._stops.matched
        return text

    def _push_tokens(self, delta: Delta) -> int:
        """Adds tokens one by one; returns the number of tokens up to the end of a stop string."""
        for index, token_id in enumerate(delta.token_ids):
            text = self._detokenizer.push(() if token_id in self._hidden_ids else (token_id,))
            if delta.logprobs:
                score = TokenScore(token_id, self._num_characters, delta.logprobs[index])
                self._scores.append(score)
            self._num_characters += len(text)
            if self.num_output_tokens + index >= self._options.min_tokens:
                text = self._up_to_stop(text)
            self._texts.append(text)
            if self.matched_stop is not None:
                self.finish_reason = FinishReason.STOP
                self.ended_s = time.perf_counter()
                return index + 1
        return len(delta.token_ids)


@dataclass(frozen=True, slots=True)
class FinalChoice:
    """A choice with its whole output.

    Attributes:
        index: its number in the answer.
    """

    choice: Choice
    piece: Piece
    index: int


def best_choices(plan: Plan, final_choices: Sequence[FinalChoice]) -> Sequence[FinalChoice]:
    """Returns the `n` best of the `best_of` choices of each prompt, best first, renumbered.

    Choices are ranked by the mean log probability of their tokens.
    """
    num_drawn, num_shown = plan.num_choices, plan.body.num_shown
    if num_drawn == num_shown:
        return final_choices
    best: list[FinalChoice] = []
    for start in range(0, len(final_choices), num_drawn):
        drawn = final_choices[start : start + num_drawn]
        best += sorted(drawn, key=_mean_log_prob, reverse=True)[:num_shown]
    return [replace(final_choice, index=index) for index, final_choice in enumerate(best)]


def check_field(choice: Choice) -> dict[str, Any]:
    """Returns the field `schema_check` of a choice whose schema had to be checked."""
    return {} if choice.schema_check is None else {"schema_check": choice.schema_check}


def stop_fields(plan: Plan, choice: Choice) -> dict[str, Any]:
    """Returns what ended a choice: vLLM's `stop_reason`, null at an end-of-sequence token, and
    SGLang's `matched_stop`, which names that token too."""
    token_id = choice.stop_token_id
    requested = plan.generations[choice.index].stop.stop_token_ids
    reason = token_id if token_id in requested else None
    matched = choice.matched_stop
    if matched is not None:
        return {"stop_reason": matched, "matched_stop": matched} | check_field(choice)
    return {"stop_reason": reason, "matched_stop": token_id} | check_field(choice)


def _mean_log_prob(final_choice: FinalChoice) -> float:
    scores = final_choice.piece.scores
    return sum(score.logprobs.log_prob for score in scores) / max(len(scores), 1)
