"""Turns a request body into a plan: fields checked, prompts tokenized, and one generation for each
prompt and choice."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gateway.constraints import (
    AnswerSchemas,
    Constraint,
    OutputConstraint,
    constraint_of,
    output_constraint,
)
from gateway.failures import client_names, give_notice
from gateway.generation import Generation, TargetModel
from gateway.model_text import ModelText
from gateway.output.style import ChatOutput, OutputStyle, ReasoningParser
from gateway.output.tool_formats import Toolbox
from gateway.prompts import (
    chat_text,
    check_choices,
    check_prompts,
    echoed_text,
    echoed_texts,
    given_prompts,
    longest_prompt,
    off_loop,
    prompt_tokens,
    toolbox_of,
    truncated,
)
from gateway.sampling import (
    OutputLength,
    StopPattern,
    check_priority,
    check_salt,
    check_stops,
    sampling_params,
    stop_params,
    with_speculation,
)
from gateway.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    Prediction,
    Thinking,
    refuse_unimplemented,
    unimplemented,
)
from gateway.settings import GatewaySettings
from shared.errors import InvalidArgument
from shared.generation import PromptScoring, check_num_top, check_token_ids
from shared.sampling_defaults import choice_seed
from shared.telemetry.tracing import current_request_id
from shared.tokens import MAX_NAMED_LOGPROBS, ThinkingBudget


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options for turning the tokens of every choice into text.

    Attributes:
        min_tokens: tokens of the output within which nothing is a stop string.
        hidden_token_ids: tokens that end generation and are not shown; none with `include_stop`.
        output: parsers of tool calls and reasoning; None when all output is text.
        include_reasoning: whether reasoning is shown.
        hides_output: the request asks only about its prompt. A target always draws a token, which
            is then not shown.
        schemas: checked against the output at its end.
        keeps_output: the whole output is needed again at its end.
    """

    stop_strings: tuple[str, ...] = ()
    stop_patterns: tuple[StopPattern, ...] = ()
    min_tokens: int = 0
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
        created: Unix time in seconds.
        body: the request as a chat or a completion, whatever its interface.
        generations: in order of choice index, which is prompt · `num_choices` + choice.
        num_choices: choices drawn for each prompt: `n`, or `best_of`.
        texts: options of each generation, where they differ; else empty, and `text` is for all.
        grammar_field: the request field that constrains the output.
        echoes_scores: an echo's log probabilities include the prompt's.
        shows_logprobs: False when log probabilities only serve to find the best choices.
        echoed_texts: texts before the output, one for each prompt; empty without echo.
    """

    request_id: str
    created: int
    body: GenerationBody
    model: TargetModel
    generations: tuple[Generation, ...]
    num_choices: int
    text: TextOptions
    texts: tuple[TextOptions, ...] = ()
    grammar_field: str = ""
    echoes_scores: bool = False
    shows_logprobs: bool = True
    echoed_texts: tuple[str, ...] = ()

    def echoed_text_of(self, index: int) -> str:
        """Returns the text before the output of a choice; empty without echo."""
        return self.echoed_texts[index // self.num_choices] if self.echoed_texts else ""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the request; a prompt counts once, whatever `n`."""
        prompts = self.generations[:: self.num_choices]
        return sum(len(generation.prompt_token_ids) for generation in prompts)


_INLINE_GRAMMAR_BYTES = 1 << 16  # a schema of this size takes a millisecond on the event loop
_INLINE_MESSAGES = 64  # rendering this many takes about a millisecond on the event loop
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes plans of request bodies.

    Raises (every method):
        InvalidArgument: the request can never be served; names the field, value and limit.
    """

    text: ModelText
    settings: GatewaySettings

    async def chat(
        self, body: ChatCompletionRequest, model: TargetModel, *, length: OutputLength | None = None
    ) -> Plan:
        """Args:
        length: limit on the output length; None takes it from the body.
        """
        refuse_unimplemented(body)
        if body.top_logprobs is not None and not body.logprobs:
            message = "top_logprobs is set; it needs logprobs to be true"
            raise InvalidArgument.of("LOGPROBS_OFF", "top_logprobs", message)
        top_logprobs = (
            check_num_top("top_logprobs", body.top_logprobs or 0) if body.logprobs else None
        )
        tokenizer, toolbox, style = self.text.tokenizer, toolbox_of(body), self.text.style
        if body.separate_reasoning is False and style.reasoning is not ReasoningParser.NONE:
            style = _without_reasoning(style, body, toolbox)
        if body.input_ids is None:
            text = await self._chat_text(body, toolbox)
        else:
            check_token_ids(
                "input_ids", body.input_ids, model.vocab_size, reason="TOKEN_OUT_OF_RANGE"
            )
            text = tokenizer.decode(body.input_ids, skip_special_tokens=False)
        if length is None and body.max_completion_tokens is not None:
            length = OutputLength(body.max_completion_tokens, "max_completion_tokens")
        length = length or OutputLength(body.max_tokens, "max_tokens")
        output, thinking = style.output(text, toolbox), None
        if body.thinking_token_budget is not None or body.thinking is not None:
            thinking = self._thinking(body, text, model)
        prompt_field = "messages" if body.input_ids is None else "input_ids"
        with client_names({"prompt": prompt_field, "max_tokens": length.field or "max_tokens"}):
            prompt = body.input_ids
            if prompt is None:  # the template writes the special tokens itself
                longest = longest_prompt(body, model)
                prompt = await tokenizer.encode(text, add_special_tokens=False, max_tokens=longest)
            plan = await self._plan(
                *(body, model, body.rid or f"chatcmpl-{uuid.uuid4().hex}", [prompt], length),
                top_logprobs=top_logprobs,
                output=output,
                thinking=thinking,
            )
        return replace(plan, echoed_texts=echoed_text(body)) if body.echo else plan

    async def _predicted(self, prediction: Prediction, model: TargetModel) -> Sequence[int]:
        """Returns the tokens of `prediction`, no more than the context holds."""
        with client_names({"prompt": "prediction"}):
            token_ids = await self.text.tokenizer.encode(prediction.text, add_special_tokens=False)
        return token_ids[: model.max_context_tokens]

    def thinking_budget(self, requested: int | None, thinking: Thinking | None) -> int | None:
        """Returns the limit on reasoning tokens; None for no limit.

        Clients send `thinking` to any model, so its limit is dropped where it cannot be kept.
        """
        budget = None if thinking is None else thinking.budget_tokens
        if requested is not None or budget is None:
            return requested
        if self.text.style.reasoning is ReasoningParser.NONE:
            return None
        if self.text.thinking_marks is None:
            what = "the reasoning of this model cannot be limited"
            give_notice(f"thinking.budget_tokens has no effect: {what}")
            return None
        return budget

    def _thinking(
        self, body: ChatCompletionRequest, prompt: str, model: TargetModel
    ) -> ThinkingBudget | None:
        """Returns the limit on reasoning; None where there is no limit or no reasoning."""
        budget = self.thinking_budget(body.thinking_token_budget, body.thinking)
        output = self.text.style.output(prompt, None)
        if budget is None or output is None:
            return None
        marks = self.text.thinking_marks
        if marks is None:
            what = "thinking_token_budget of a model whose marks of reasoning are not single tokens"
            raise unimplemented("thinking_token_budget", what)
        max_tokens = min(budget, model.max_context_tokens)
        return ThinkingBudget(max_tokens, marks[1], None if output.starts_inside else marks[0])

    async def chat_prompt(self, body: ChatCompletionRequest) -> list[int]:
        """Returns the token ids of a chat."""
        text = await self._chat_text(body, toolbox_of(body))
        with client_names({"prompt": "messages"}):
            return await self.text.tokenizer.encode(text, add_special_tokens=False)

    async def _chat_text(self, body: ChatCompletionRequest, toolbox: Toolbox | None) -> str:
        render = partial(chat_text, body, toolbox, self.text, self.settings.max_template_characters)
        if len(body.messages) <= _INLINE_MESSAGES and body.chat_template is None:
            return render()
        return await off_loop("messages", render)

    async def completion(
        self,
        body: CompletionRequest,
        model: TargetModel,
        *,
        scored_from: int | None = None,
        default_tokens: int = _DEFAULT_COMPLETION_TOKENS,
        keeps_likeliest: bool = False,
    ) -> Plan:
        """Args:
        scored_from: first prompt token that gets log probabilities, with or without echo.
        default_tokens: `max_tokens` where the body has none.
        keeps_likeliest: `logprob_token_ids` does not replace the likeliest tokens.
        """
        refuse_unimplemented(body)
        if body.thinking_token_budget is not None:
            what = "thinking_token_budget in this interface"
            raise unimplemented("thinking_token_budget", what)
        num_drawn = self._num_drawn(body)
        top_logprobs = None
        if body.logprobs is not None:
            top_logprobs = check_num_top("logprobs", body.logprobs)
        scoring = _scoring(body, top_logprobs, scored_from)
        if num_drawn is not None:  # the choices are ranked by log probability
            top_logprobs = top_logprobs or 0
        tokenizer = self.text.tokenizer
        inputs = given_prompts(body)
        check_prompts(self.settings, len(inputs))
        prompts = [await prompt_tokens(prompt, body, model, tokenizer) for prompt in inputs]
        length = OutputLength(body.max_tokens, "max_tokens")
        if body.max_tokens is None:
            length = OutputLength(default_tokens)
        plan = await self._plan(
            *(body, model, body.rid or f"cmpl-{uuid.uuid4().hex}", prompts, length),
            top_logprobs=top_logprobs,
            scoring=scoring,
            num_drawn=num_drawn,
            keeps_likeliest=keeps_likeliest,
        )
        firsts = plan.generations[:: plan.num_choices]
        kept = [generation.prompt_token_ids for generation in firsts]
        return replace(
            plan,
            echoed_texts=echoed_texts(body, prompts, kept, tokenizer),
            echoes_scores=body.echo and body.logprobs is not None,
            shows_logprobs=body.logprobs is not None,
        )

    def _num_drawn(self, body: CompletionRequest) -> int | None:
        """Returns `best_of`; None where it equals `n`."""
        num_shown = body.num_shown
        if body.best_of is None or body.best_of == num_shown:
            return None
        if not num_shown < body.best_of <= self.settings.max_choices:
            limit = f"[n={num_shown}, {self.settings.max_choices}]"
            raise InvalidArgument.out_of_range("best_of", body.best_of, limit)
        if body.stream:
            message = "best_of is above n; the best are known at the end, so stream must be false"
            raise InvalidArgument.of("STREAM_ON", "best_of", message)
        return body.best_of

    async def _plan(
        self,
        body: GenerationBody,
        model: TargetModel,
        request_id: str,
        prompts: Sequence[list[int]],
        length: OutputLength,
        *,
        top_logprobs: int | None,
        output: ChatOutput | None = None,
        scoring: PromptScoring | None = None,
        num_drawn: int | None = None,
        thinking: ThinkingBudget | None = None,
        keeps_likeliest: bool = False,
    ) -> Plan:
        """Plans a chat or a completion whose prompts are tokenized.

        Args:
            length: most tokens of a choice.
            top_logprobs: None for no log probabilities.
            output: parsers of tool calls and reasoning; None when all output is text.
            scoring: the prompt tokens whose log probabilities an echo needs.
            num_drawn: `best_of`; None where it equals `n`.
            thinking: limit on the reasoning; None for no limit.
            keeps_likeliest: `logprob_token_ids` does not replace the likeliest tokens.
        """
        predicted: Sequence[int] = ()
        if body.prediction is not None:
            predicted = await self._predicted(body.prediction, model)
        if body.prompt_logprobs is not None:
            scoring = PromptScoring(0, check_num_top("prompt_logprobs", body.prompt_logprobs))
        num_choices = body.num_shown if num_drawn is None else num_drawn
        check_choices(self.settings, num_choices, len(prompts))
        for name, texts in (("stop", body.stop), ("stop_regex", body.stop_regex)):
            if texts is not None:
                check_stops(self.settings, name, _as_tuple(texts))
        _check_streaming(body)
        requested, constraint = constraint_of(body), OutputConstraint()
        if requested is not None or output is not None:
            constraint = await _output_constraint(requested, output)
            if output is not None and requested and constraint.grammar is requested.grammar:
                # The grammar is that of the whole output, so there is no reasoning in it.
                output = replace(output, starts_inside=False)
        if body.truncate_prompt_tokens is not None:
            prompts = [truncated(prompt, body, model, length.max_tokens) for prompt in prompts]
        # A target draws one token even where the request asks only about its prompt.
        is_echo = isinstance(body, CompletionRequest) and body.echo
        hides_output = length.max_tokens == 0 and (is_echo or scoring is not None)
        least_tokens = int(hides_output)
        sampling = sampling_params(body, self.text.defaults, model, self.text.tokenizer, thinking)
        stops = [
            stop_params(body, length, len(prompt), model, least_tokens=least_tokens)
            for prompt in prompts
        ]
        named: Sequence[int] = ()
        if body.logprob_token_ids:
            if hides_output and not keeps_likeliest and top_logprobs is not None:
                message = "logprob_token_ids applies to output tokens, and max_tokens is 0"
                raise InvalidArgument.of("OUTPUT_EMPTY", "logprob_token_ids", message)
            named = _named_tokens(body.logprob_token_ids, model, top_logprobs)
        generation = Generation(
            request_id=current_request_id.get(),
            prompt_token_ids=prompts[0],
            sampling=sampling,
            stop=stops[0],
            has_seed=body.seed is not None,
            # A request that names tokens gets those alone, unless it wants the likeliest as well.
            top_logprobs=0 if named and not keeps_likeliest else top_logprobs,
            grammar=constraint.grammar,
            priority=0 if body.priority is None else check_priority(body.priority),
            cache_salt="" if body.salt is None else check_salt(body.salt),
            predicted_token_ids=predicted,
            logprob_token_ids=named,
            prompt_scoring=scoring,
        )
        if body.speculation is not None:
            generation = with_speculation(generation, body.speculation)
        _check_scoring(scoring, prompts)
        # The first choice has the request's own seed.
        seeds = (choice_seed(sampling.seed, choice) for choice in range(1, num_choices))
        samplings = [sampling, *(replace(sampling, seed=seed) for seed in seeds)]
        ends = stops[0].stop_token_ids | (frozenset() if body.ignore_eos else model.eos_token_ids)
        return Plan(
            request_id=request_id,
            created=int(time.time()),
            body=body,
            model=model,
            generations=tuple(
                replace(generation, prompt_token_ids=prompt, stop=stop, sampling=each)
                for prompt, stop in zip(prompts, stops, strict=True)
                for each in samplings
            ),
            num_choices=num_choices,
            text=replace(
                _text_options(body),
                hidden_token_ids=frozenset() if body.keeps_stop else ends,
                with_logprobs=top_logprobs is not None,
                output=output,
                hides_output=hides_output,
                schemas=constraint.schemas,
                keeps_output=constraint.schemas is not None,
            ),
            grammar_field=constraint.field,
        )


def _text_options(body: GenerationBody) -> TextOptions:
    """Returns the options that follow from the body alone."""
    # A completion's output is all text, reasoning included.
    hides_reasoning = isinstance(body, ChatCompletionRequest) and body.include_reasoning is False
    return TextOptions(
        stop_strings=_as_tuple(body.stop),
        stop_patterns=tuple(map(StopPattern.of, _as_tuple(body.stop_regex))),
        min_tokens=body.min_tokens or 0,
        include_stop=body.keeps_stop,
        skip_special_tokens=body.skip_special_tokens is not False,
        with_rounds=body.speculation is not None and body.speculation.trace,
        include_reasoning=not hides_reasoning,
    )


def _check_scoring(scoring: PromptScoring | None, prompts: Sequence[Sequence[int]]) -> None:
    """Raises:
    InvalidArgument: the first token to score is not in a prompt.
    """
    start = 0 if scoring is None else scoring.start
    for num_tokens in map(len, prompts):
        if not 0 <= start < num_tokens:
            limit = f"[0, {num_tokens - 1}]"
            raise InvalidArgument.out_of_range("prompt_logprob_start", start, limit)


def _check_streaming(body: GenerationBody) -> None:
    """Raises:
    InvalidArgument: a field applies only to a stream, or only to a whole answer.
    """
    if body.prompt_logprobs is not None and body.stream:
        message = "prompt_logprobs is set; it needs stream to be false"
        raise InvalidArgument.of("STREAM_ON", "prompt_logprobs", message)
    if body.stream_options is not None and not body.stream:
        message = "stream_options is set; it needs stream to be true"
        raise InvalidArgument.of("STREAM_OFF", "stream_options", message)


def _named_tokens(
    given: Sequence[int], model: TargetModel, top_logprobs: int | None
) -> Sequence[int]:
    """Returns the tokens of `logprob_token_ids` without repeats.

    Raises:
        InvalidArgument: there are too many, one is no token, or log probabilities are off.
    """
    if top_logprobs is None:
        message = "logprob_token_ids is set; it needs logprobs"
        raise InvalidArgument.of("LOGPROBS_OFF", "logprob_token_ids", message)
    named = tuple(dict.fromkeys(given))
    if len(named) > MAX_NAMED_LOGPROBS:
        limit = f"at most {MAX_NAMED_LOGPROBS}"
        raise InvalidArgument.wrong_count("logprob_token_ids", len(named), "tokens", limit)
    check_token_ids("logprob_token_ids", named, model.vocab_size)
    return named


async def _output_constraint(
    requested: Constraint | None, output: ChatOutput | None
) -> OutputConstraint:
    """Builds the constraint on the event loop if it is small, else in a worker thread."""
    build = partial(output_constraint, requested, output)
    size_bytes = 0 if requested is None else requested.grammar.size_bytes
    if output is not None and output.constrains_calls(is_constrained=requested is not None):
        size_bytes += output.schemas_size
    is_small = size_bytes <= _INLINE_GRAMMAR_BYTES
    constraint = build() if is_small else await off_loop("the schemas", build)
    for notice in constraint.notices:
        give_notice(notice)
    return constraint


def _as_tuple(texts: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the texts of a field that takes one or several."""
    return (texts,) if isinstance(texts, str) else tuple(texts or ())


def _without_reasoning(
    style: OutputStyle, body: ChatCompletionRequest, toolbox: Toolbox | None
) -> OutputStyle:
    """Returns the style of an output whose reasoning is left in the text."""
    if toolbox is not None or constraint_of(body) is not None:
        what = "separate_reasoning: false beside tools or a grammar"
        raise unimplemented("separate_reasoning", what)
    return replace(style, reasoning=ReasoningParser.NONE)


def _scoring(
    body: CompletionRequest, top_logprobs: int | None, scored_from: int | None
) -> PromptScoring | None:
    """Returns the scoring of prompt tokens: an echo with log probabilities needs the prompt's."""
    if scored_from is not None:
        return PromptScoring(scored_from, top_logprobs or 0)
    return PromptScoring(0, top_logprobs) if body.echo and top_logprobs is not None else None
