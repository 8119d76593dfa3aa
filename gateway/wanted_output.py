"""The output options of a request body, the same for every interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.generation import Generation, PromptScoring, TargetModel
from gateway.output.held_schema import AnswerSchemas
from gateway.output.style import ChatOutput
from gateway.output_length import OutputLength
from gateway.plan import TextOptions
from gateway.sampling import (
    check_algorithm,
    check_named,
    check_priority,
    check_salt,
    check_top_logprobs,
    sampling_params,
    stop_params,
)
from gateway.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    Speculation,
)
from gateway.stop_patterns import StopPattern
from gateway.text.model_text import ModelText
from shared.errors import InvalidArgument
from shared.grammar import Grammar
from shared.seeds import choice_seed
from shared.speculation_limits import OUTCOMES, TREE_STEPS, TREE_TOKENS
from shared.tokens import StopParams, ThinkingBudget


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
    def num_likeliest(self) -> int | None:
        """The likeliest tokens that have log probabilities; none where the request names others,
        unless it wants both."""
        return 0 if self.body.logprob_token_ids and not self.keeps_likeliest else self.top_logprobs

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

    @property
    def include_reasoning(self) -> bool:
        return not isinstance(self.body, ChatCompletionRequest) or (
            self.body.include_reasoning is not False
        )

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
        generation = Generation(
            prompt_token_ids=prompt,
            sampling=sampling,
            stop=stop_params(body, self.num_asked, len(prompt), self.model),
            has_seed=body.seed is not None,
            top_logprobs=self.num_likeliest,
            is_speculation_disabled=speculation.disable,
            draft_algorithm=check_algorithm(speculation),
            num_draft_steps=TREE_STEPS.checked(speculation.num_steps),
            num_draft_tokens=TREE_TOKENS.checked(speculation.num_draft_tokens),
            num_outcomes=OUTCOMES.checked(speculation.outcome_budget),
            wants_rounds=speculation.trace,
            grammar=grammar,
            priority=check_priority(body.priority),
            cache_salt=check_salt(body.cache_salt),
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
        return TextOptions(
            stop_strings=body.stop_strings,
            stop_patterns=tuple(map(StopPattern.of, body.stop_regexes)),
            include_stop=body.keeps_stop,
            skip_special_tokens=body.skip_special_tokens is not False,
            hidden_token_ids=hidden,
            with_logprobs=self.top_logprobs is not None,
            with_rounds=body.speculation is not None and body.speculation.trace,
            output=self.output,
            include_reasoning=self.include_reasoning,
            hides_output=self.hides_output,
            schemas=schemas,
            keeps_output=schemas is not None,
        )
