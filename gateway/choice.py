"""One choice: events in, text out while it is generated, and all of its output at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gateway.generation import Finished, NodeBudget, round_fields
from gateway.output.parser import Content, OutputParser, Part, Reasoning
from gateway.planner import Plan, TextOptions
from gateway.schema_trial import Verdict
from gateway.stop_patterns import StopPatterns
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
    """Output that has not been sent yet. `text` may be shorter than what the tokens spell: the
    rest may still become a stop string or be half a character.

    A tuple, because one is made for every choice and step, and a frozen dataclass costs twice.

    Attributes:
        text: for the user; without calls and reasoning, where those are parsed.
        rounds: as JSON objects.
        parts: text, calls and reasoning in order; empty where all of it is text.
    """

    text: str
    token_ids: Sequence[int] = ()
    scores: Sequence[TokenScore] = ()
    rounds: Sequence[dict[str, Any]] = ()
    parts: Sequence[Part] = ()


class Choice:
    """Turns the tokens of one generation into text and counts them.

    Attributes:
        finish_reason: None while it runs.
        num_output_tokens: tokens of the output; when a stop string ends it, up to the token that
            completed the string, even where a step brought more.
        num_accepted: how many of them are accepted draft tokens.
        prompt_scores: log probabilities of the prompt's tokens, from where they were asked for; all
            of them are there before the first token of output.
        matched_stop: the stop string, or the pattern as it was written, that ended it.
        stop_token_id: the token that ended it, where one did and no stop string.
        begun_s, started_s, first_s, ended_s: when it was asked for, left the target's queue, and
            had its first and its last token; of `time.perf_counter`.
        weight_spans: each version of the weights, and the place of the first token drawn with it.
        schema_check: whether it keeps to its schema, where a grammar does not hold all of that.
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
        self._parser = None if output is None else OutputParser(output.format(), output.new_call_id)
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
        self._token_ids: list[int] = []
        self._scores: list[TokenScore] = []
        self._rounds: list[dict[str, Any]] = []
        self._nodes = NodeBudget()
        self._kept: list[Piece] = []
        self._last: Piece | None = None
        self._is_held = False
        self.schema_check: Verdict | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of reasoning tokens among the tokens taken so far."""
        return 0 if self._parser is None else self._parser.num_reasoning_tokens

    @property
    def finish_name(self) -> str | None:
        """OpenAI's name of the reason; None while it runs. For after the last `take`."""
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
        # Only the last one can have ended the generation.
        if token_ids and token_ids[-1] in self._hidden_ids:
            shown = token_ids[:-1]
        self._texts.append(self._detokenizer.push(shown))
        self._token_ids += token_ids
        self.num_output_tokens += len(token_ids)
        self.num_accepted += delta.num_accepted

    def finish(self, event: Finished) -> None:
        """Ends the choice; text that was held back becomes output."""
        tail = self._detokenizer.flush()
        if tail:
            self._add_text(tail)
        if self._stops is not None and self.matched_stop is None:
            self._texts.append(self._stops.flush())
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
        """Returns what is new. None while there is no text: scores and token ids go with text.

        Rounds are news by themselves: a page shows them as they happen.
        """
        if self._is_held:
            piece, self._last = self._last, None
            return piece
        parts: Sequence[Part] = ()
        if self._parser is None:
            text = "".join(self._texts)
        else:
            parts = self._parsed(self._parser)
            text = _content(parts)
        self._texts.clear()
        is_news = text or parts or self._rounds or (self.finish_reason and self._token_ids)
        if not is_news:
            return None
        piece = Piece(text, self._token_ids, self._scores, self._rounds, parts)
        self._token_ids = []
        if self._is_token_wise:
            self._scores, self._rounds = [], []
            self._nodes.num_nodes = 0
        if self._options.keeps_output:
            self._kept.append(piece)
        return piece

    def take_text(self) -> str:
        """Returns the new text, like `take`, where nobody asks for more: all of the output is text
        and it still runs."""
        text = "".join(self._texts)
        self._texts.clear()
        self._token_ids.clear()
        return text

    def hold(self) -> Piece:
        """Returns all of the output, once it has ended; the next `take` still returns its end."""
        if not self._is_held:
            self._last = self.take()
            self._is_held = True
        kept = self._kept
        return Piece(
            "".join(piece.text for piece in kept),
            [each for piece in kept for each in piece.token_ids],
            [each for piece in kept for each in piece.scores],
            [each for piece in kept for each in piece.rounds],
            [each for piece in kept for each in piece.parts],
        )

    def _parsed(self, parser: OutputParser) -> list[Part]:
        """Returns the parts of the new text."""
        found = parser.push_tokens(self._texts)
        if self.finish_reason is not None:
            found += parser.flush()
        if self._options.include_reasoning:
            return found
        return [part for part in found if not isinstance(part, Reasoning)]

    def _push_token_wise(self, delta: Delta) -> None:
        """Adds what must be looked at token by token, or told of each."""
        num_taken = self._push_each(delta)
        if delta.trace is not None:
            round_ = self._nodes.admit(delta.trace)
            texts = self._texts[-num_taken:]
            self._rounds.append(round_fields(delta, round_, texts, self._tokenizer))
        self._token_ids += delta.token_ids[:num_taken]
        self.num_output_tokens += num_taken
        self.num_accepted += min(delta.num_accepted, num_taken)

    def _add_text(self, text: str) -> None:
        if self._stops is not None:
            text = self._stops.push(text)
            self.matched_stop = self._stops.matched
        self._texts.append(text)

    def _push_each(self, delta: Delta) -> int:
        """Adds tokens one at a time; returns how many there are up to a stop string's end."""
        for number, token_id in enumerate(delta.token_ids):
            text = self._detokenizer.push(() if token_id in self._hidden_ids else (token_id,))
            if delta.logprobs:
                score = TokenScore(token_id, self._num_characters, delta.logprobs[number])
                self._scores.append(score)
            self._num_characters += len(text)
            self._add_text(text)
            if self.matched_stop is not None:
                self.finish_reason = FinishReason.STOP
                self.ended_s = time.perf_counter()
                return number + 1
        return len(delta.token_ids)


def _content(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


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
