"""The plan of one HTTP request: checked and tokenized. Made by `planner.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.generation import Generation, PromptScoring, TargetModel
from gateway.model_text import ModelText
from gateway.notices import give_notice
from gateway.output.held_schema import AnswerSchemas
from gateway.output.style import ChatOutput
from gateway.sampling import (
    check_algorithm,
    check_named,
    check_priority,
    check_salt,
    check_top_logprobs,
    sampling_params,
    stop_params,
)
from gateway.schema import ChatCompletionRequest, CompletionRequest, GenerationBody, Speculation
from gateway.stop_patterns import StopPattern
from shared.errors import InvalidArgument
from shared.grammar import Grammar
from shared.sampling_defaults import OUTCOMES, TREE_STEPS, TREE_TOKENS, choice_seed
from shared.tokens import StopParams, ThinkingBudget


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options for turning the tokens of every choice into text.

    Attributes:
        hidden_token_ids: tokens that end generation and are not shown, unless a stop is.
        output: parsers of tool calls and reasoning; None when all of it is text.
        include_reasoning: whether reasoning is shown.
        hides_output: the request asks for no token at all, only for what a target says of its
            prompt. A target always draws one.
        schemas: that it is checked against when it ends.
        keeps_output: all of it is needed again when it has ended.
    """

    stop_strings: tuple[str, ...] = ()
    stop_patterns: tuple[StopPattern, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    hidden_token_ids: frozenset[int] = frozenset()
    with_logprobs: bool = False
    with_rounds: bool = False
    output: ChatOutput | None = None
    include_reasoning: bool = True
    hides_output: bool = False
    schemas: AnswerSchemas | None = None
    keeps_output: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One HTTP request, checked and tokenized.

    Attributes:
        request_id: shown to the client as `id`.
        texts: of each generation, where they differ; else `text` is that of all.
        created: Unix time in seconds.
        generations: in order of choice index, which is prompt · `num_choices` + choice.
        num_choices: choices drawn for each prompt: `n`, or `best_of`.
        num_shown: how many of them are the answer.
        echoes_scores: the log probabilities of an echo hold those of the prompt.
        shows_logprobs: False when log probabilities only serve to find the best choices.
        shows_prompt_logprobs: the answer has vLLM's `prompt_logprobs`.
        tokens_as_ids: log probabilities name tokens by their ids.
        fingerprint: what the answer depends on beside the request.
        service_tier: as OpenAI names what the request was served by; None where it was not asked.
        grammar_field: where the client said what the output must match.
        echoed_texts: what goes before the output, one for each prompt; empty without echo.
    """

    request_id: str
    created: int
    model: str
    generations: tuple[Generation, ...]
    num_choices: int
    text: TextOptions
    is_stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    fingerprint: str = ""
    service_tier: str | None = None
    texts: tuple[TextOptions, ...] = ()
    grammar_field: str = ""
    num_shown: int = 1
    echoes_scores: bool = False
    shows_prompt_logprobs: bool = False
    shows_logprobs: bool = True
    echoed_texts: tuple[str, ...] = ()

    @property
    def names_scored_tokens(self) -> bool:
        """Whether the request named the tokens whose log probabilities it wants."""
        return bool(self.generations[0].logprob_token_ids)

    def text_of(self, index: int) -> TextOptions:
        """Returns how the output of a choice becomes text."""
        return self.texts[index] if self.texts else self.text

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the request; a prompt counts once, whatever `n`."""
        prompts = self.generations[:: self.num_choices]
        return sum(len(generation.prompt_token_ids) for generation in prompts)


@dataclass(frozen=True, slots=True)
class OutputLength:
    """The limits on the output's length in a request.

    Attributes:
        max_tokens: None is all that the context leaves.
        field: that named it; None is a default, which is cut in silence.
        is_capped: more than the context leaves is cut with a notice, as clients of the interface
            rely on; else it is refused, as vLLM and SGLang do.
    """

    max_tokens: int | None
    field: str | None = None
    is_capped: bool = False

    def check(self, num_prompt_tokens: int, model: TargetModel) -> None:
        """Raises:
        InvalidArgument: the context does not hold prompt and output.
        """
        limit, max_tokens, field = model.max_context_tokens, self.max_tokens, self.field
        num_left = limit - num_prompt_tokens
        if field is None or max_tokens is None or not 0 < num_left < max_tokens:
            return
        # Client libraries look for the words "maximum context length is".
        message = (
            f"{field} is {max_tokens:,}; it must be at most {num_left:,}, because this model's "
            f"maximum context length is {limit:,} tokens and the prompt has {num_prompt_tokens:,}"
        )
        if not self.is_capped:
            raise InvalidArgument.of("OUTPUT_TOO_LONG", field, message)
        give_notice(f"{field} is {max_tokens:,}; the context leaves {num_left:,}")


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """The two kinds of body reduced to what they share, before prompts and choices multiply it.

    Attributes:
        top_logprobs: None wants no log probabilities.
        length: most tokens of a choice.
        output: parsers of tool calls and reasoning; None when all of it is text.
        echo_scoring: which prompt tokens an echo needs log probabilities of.
        num_drawn: `best_of`; None where it is `n`.
        thinking: bounds the reasoning; None leaves it free.
        predicted: tokens of `prediction`.
        keeps_likeliest: the likeliest tokens have log probabilities beside those that the request
            names.
    """

    body: GenerationBody
    model: TargetModel
    trace_id: str
    top_logprobs: int | None
    length: OutputLength
    output: ChatOutput | None = None
    echo_scoring: PromptScoring | None = None
    num_drawn: int | None = None
    thinking: ThinkingBudget | None = None
    predicted: Sequence[int] = ()
    keeps_likeliest: bool = False

    @property
    def num_shown(self) -> int:
        """Choices of the answer, for each prompt."""
        return 1 if self.body.n is None else self.body.n

    @property
    def num_choices(self) -> int:
        """Choices drawn for each prompt."""
        return self.num_shown if self.num_drawn is None else self.num_drawn

    @property
    def prompt_scoring(self) -> PromptScoring | None:
        """Prompt scoring for `prompt_logprobs`, or for an echo with log probabilities."""
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return self.echo_scoring
        return PromptScoring(0, check_top_logprobs("prompt_logprobs", num_top))

    @property
    def logprob_token_ids(self) -> Sequence[int]:
        """Raises:
        InvalidArgument: there are too many, one is no token, or log probabilities are off.
        """
        asked = self.body.logprob_token_ids or ()
        if asked and self.top_logprobs is None:
            message = "logprob_token_ids is set; it needs logprobs"
            raise InvalidArgument.of("LOGPROBS_OFF", "logprob_token_ids", message)
        if asked and self.hides_output and not self.keeps_likeliest:
            message = "logprob_token_ids applies to output tokens, and max_tokens is 0"
            raise InvalidArgument.of("OUTPUT_EMPTY", "logprob_token_ids", message)
        return check_named(asked, self.model)

    @property
    def hides_output(self) -> bool:
        """Whether no output is asked for, but what the target says of the prompt."""
        is_echo = isinstance(self.body, CompletionRequest) and self.body.echo
        return self.length.max_tokens == 0 and (is_echo or self.prompt_scoring is not None)

    @property
    def num_asked(self) -> int | None:
        """Tokens asked of the target, which draws one at least."""
        return 1 if self.hides_output else self.length.max_tokens

    def generations(
        self, prompt: list[int], grammar: Grammar | None, text: ModelText
    ) -> list[Generation]:
        """Returns the choices of one prompt.

        Raises:
            InvalidArgument: a value is out of its range; names the field.
        """
        body, speculation = self.body, self.body.speculation or Speculation()
        sampling = sampling_params(body, text.defaults, self.model, text.tokenizer, self.thinking)
        self.length.check(len(prompt), self.model)
        names_others = body.logprob_token_ids and not self.keeps_likeliest
        generation = Generation(
            prompt_token_ids=prompt,
            sampling=sampling,
            stop=stop_params(body, self.num_asked, len(prompt), self.model),
            has_seed=body.seed is not None,
            # None of the likeliest where the request names others, unless it wants both.
            top_logprobs=0 if names_others else self.top_logprobs,
            is_speculation_disabled=speculation.disable,
            draft_algorithm=check_algorithm(speculation),
            num_draft_steps=TREE_STEPS.checked(speculation.num_steps),
            num_draft_tokens=TREE_TOKENS.checked(speculation.num_draft_tokens),
            num_outcomes=OUTCOMES.checked(speculation.outcome_budget),
            wants_rounds=speculation.trace,
            grammar=grammar,
            priority=check_priority(body.priority),
            cache_salt=check_salt(body.salt),
            predicted=self.predicted,
            logprob_token_ids=self.logprob_token_ids,
            prompt_scoring=self.prompt_scoring,
            trace_id=self.trace_id,
        )
        scoring = generation.prompt_scoring
        if scoring is not None and not 0 <= scoring.start < len(prompt):
            raise InvalidArgument.out_of_range(
                "prompt_logprob_start", scoring.start, f"[0, {len(prompt) - 1}]"
            )
        seeds = (choice_seed(sampling.seed, choice) for choice in range(self.num_choices))
        return [replace(generation, sampling=replace(sampling, seed=seed)) for seed in seeds]

    def text_options(self, stop: StopParams, schemas: AnswerSchemas | None) -> TextOptions:
        body = self.body
        eos = frozenset() if body.ignore_eos else self.model.eos_token_ids
        hidden = frozenset() if body.keeps_stop else stop.stop_token_ids | eos
        # All of a completion is text, reasoning as well.
        hides_reasoning = isinstance(body, ChatCompletionRequest) and (
            body.include_reasoning is False
        )
        return TextOptions(
            stop_strings=body.stop_strings,
            stop_patterns=tuple(map(StopPattern.of, body.stop_regexes)),
            include_stop=body.keeps_stop,
            skip_special_tokens=body.skip_special_tokens is not False,
            hidden_token_ids=hidden,
            with_logprobs=self.top_logprobs is not None,
            with_rounds=body.speculation is not None and body.speculation.trace,
            output=self.output,
            include_reasoning=not hides_reasoning,
            hides_output=self.hides_output,
            schemas=schemas,
            keeps_output=schemas is not None,
        )
