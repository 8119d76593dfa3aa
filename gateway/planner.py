"""Turns a request body into a plan: fields checked, prompts tokenized, and one generation for each
prompt and choice."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from gateway.constraints import (
    AnswerSchemas,
    Constraint,
    OutputConstraint,
    constraint_of,
    output_constraint,
)
from gateway.failures import client_names, give_notice
from gateway.generation import Generation, TargetModel, fingerprint
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
from shared.grammar import Grammar
from shared.sampling_defaults import choice_seed
from shared.telemetry.tracing import current_request_id
from shared.tokens import MAX_NAMED_LOGPROBS, StopParams, ThinkingBudget


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options for turning the tokens of every choice into text.

    Attributes:
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
        texts: options of each generation, where they differ; else empty, and `text` is for all.
        created: Unix time in seconds.
        generations: in order of choice index, which is prompt · `num_choices` + choice.
        num_choices: choices drawn for each prompt: `n`, or `best_of`.
        num_shown: choices shown for each prompt.
        echoes_scores: an echo's log probabilities include the prompt's.
        shows_logprobs: False when log probabilities only serve to find the best choices.
        shows_prompt_logprobs: the answer has vLLM's `prompt_logprobs`.
        tokens_as_ids: log probabilities name tokens by their ids.
        fingerprint: identifies what the answer depends on beside the request.
        service_tier: OpenAI's name of the tier; None where the request names no tier.
        grammar_field: the request field that constrains the output.
        echoed_texts: texts before the output, one for each prompt; empty without echo.
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

    def echoed_text_of(self, index: int) -> str:
        """Returns the text before the output of a choice; empty without echo."""
        return self.echoed_texts[index // self.num_choices] if self.echoed_texts else ""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the request; a prompt counts once, whatever `n`."""
        prompts = self.generations[:: self.num_choices]
        return sum(len(generation.prompt_token_ids) for generation in prompts)


@dataclass(slots=True)
class WantedOutput:
    """The output that a chat or completion body asks for, the same for all prompts and choices.

    Attributes:
        top_logprobs: None for no log probabilities.
        length: most tokens of a choice.
        output: parsers of tool calls and reasoning; None when all output is text.
        echo_scoring: the prompt tokens whose log probabilities an echo needs.
        num_drawn: `best_of`; None where it equals `n`.
        thinking: limit on the reasoning; None for no limit.
        predicted: tokens of `prediction`.
        keeps_likeliest: log probabilities of the likeliest tokens beside those of the named tokens.
        num_shown, num_choices: choices shown and drawn for each prompt.
        prompt_scoring: for `prompt_logprobs`, or for an echo with log probabilities.
        hides_output: the request asks only about its prompt, for no output.
    """

    body: GenerationBody
    model: TargetModel
    top_logprobs: int | None
    length: OutputLength
    output: ChatOutput | None = None
    echo_scoring: PromptScoring | None = None
    num_drawn: int | None = None
    thinking: ThinkingBudget | None = None
    predicted: Sequence[int] = ()
    keeps_likeliest: bool = False
    num_shown: int = field(init=False)
    num_choices: int = field(init=False)
    prompt_scoring: PromptScoring | None = field(init=False)
    hides_output: bool = field(init=False)
    stop_strings: tuple[str, ...] = field(init=False)
    stop_regexes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        body = self.body
        self.num_shown = 1 if body.n is None else body.n
        self.num_choices = self.num_shown if self.num_drawn is None else self.num_drawn
        self.prompt_scoring = self.echo_scoring
        if body.prompt_logprobs is not None:
            num_top = check_num_top("prompt_logprobs", body.prompt_logprobs)
            self.prompt_scoring = PromptScoring(0, num_top)
        is_echo = isinstance(body, CompletionRequest) and body.echo
        is_scored = is_echo or self.prompt_scoring is not None
        self.hides_output = self.length.max_tokens == 0 and is_scored
        self.stop_strings = _as_tuple(body.stop)
        self.stop_regexes = _as_tuple(body.stop_regex)

    def generations(
        self, prompt: list[int], grammar: Grammar | None, text: ModelText
    ) -> list[Generation]:
        """Returns the choices of one prompt.

        Raises:
            InvalidArgument: a value is out of its range; names the field.
        """
        body, salt = self.body, self.body.salt
        sampling = sampling_params(body, text.defaults, self.model, text.tokenizer, self.thinking)
        only_named = body.logprob_token_ids and not self.keeps_likeliest
        generation = Generation(
            request_id=current_request_id.get(),
            prompt_token_ids=prompt,
            sampling=sampling,
            # A target draws one token even where no output is asked for.
            stop=stop_params(
                body, self.length, len(prompt), self.model, least_tokens=int(self.hides_output)
            ),
            has_seed=body.seed is not None,
            # A request that names tokens gets those alone, unless it wants the likeliest as well.
            top_logprobs=0 if only_named else self.top_logprobs,
            grammar=grammar,
            priority=0 if body.priority is None else check_priority(body.priority),
            cache_salt="" if salt is None else check_salt(salt),
            predicted_token_ids=self.predicted,
            logprob_token_ids=self._named_tokens() if body.logprob_token_ids else (),
            prompt_scoring=self.prompt_scoring,
        )
        if body.speculation is not None:
            generation = with_speculation(generation, body.speculation)
        scoring = self.prompt_scoring
        if scoring is not None and not 0 <= scoring.start < len(prompt):
            raise InvalidArgument.out_of_range(
                "prompt_logprob_start", scoring.start, f"[0, {len(prompt) - 1}]"
            )
        # The first choice has the request's own seed.
        seeds = (choice_seed(sampling.seed, choice) for choice in range(1, self.num_choices))
        return [
            generation,
            *(replace(generation, sampling=replace(sampling, seed=seed)) for seed in seeds),
        ]

    def _named_tokens(self) -> Sequence[int]:
        """Returns the tokens of `logprob_token_ids` without repeats.

        Raises:
            InvalidArgument: there are too many, one is no token, or log probabilities are off.
        """
        if self.top_logprobs is None:
            message = "logprob_token_ids is set; it needs logprobs"
            raise InvalidArgument.of("LOGPROBS_OFF", "logprob_token_ids", message)
        if self.hides_output and not self.keeps_likeliest:
            message = "logprob_token_ids applies to output tokens, and max_tokens is 0"
            raise InvalidArgument.of("OUTPUT_EMPTY", "logprob_token_ids", message)
        named = tuple(dict.fromkeys(self.body.logprob_token_ids or ()))
        if len(named) > MAX_NAMED_LOGPROBS:
            limit = f"at most {MAX_NAMED_LOGPROBS}"
            raise InvalidArgument.wrong_count("logprob_token_ids", len(named), "tokens", limit)
        check_token_ids("logprob_token_ids", named, self.model.vocab_size)
        return named

    def text_options(self, stop: StopParams, schemas: AnswerSchemas | None) -> TextOptions:
        body = self.body
        eos = frozenset() if body.ignore_eos else self.model.eos_token_ids
        hidden = frozenset() if body.keeps_stop else stop.stop_token_ids | eos
        # A completion's output is all text, reasoning included.
        hides_reasoning = isinstance(body, ChatCompletionRequest) and (
            body.include_reasoning is False
        )
        return TextOptions(
            stop_strings=self.stop_strings,
            stop_patterns=tuple(map(StopPattern.of, self.stop_regexes)),
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
        wanted = WantedOutput(
            body,
            model,
            top_logprobs,
            length or OutputLength(body.max_tokens, "max_tokens"),
            style.output(text, toolbox),
            predicted=await self._predicted(body.prediction, model) if body.prediction else (),
        )
        if body.thinking_token_budget is not None or body.thinking is not None:
            wanted.thinking = self._thinking(body, text, model)
        prompt_field = "messages" if body.input_ids is None else "input_ids"
        length_field = wanted.length.field or "max_tokens"
        with client_names({"prompt": prompt_field, "max_tokens": length_field}):
            prompt = body.input_ids
            if prompt is None:  # the template writes the special tokens itself
                longest = longest_prompt(body, model)
                prompt = await tokenizer.encode(text, add_special_tokens=False, max_tokens=longest)
            request_id = body.rid or f"chatcmpl-{uuid.uuid4().hex}"
            plan = await self._plan(wanted, request_id, [prompt])
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
        wanted = WantedOutput(
            body,
            model,
            top_logprobs,
            length,
            None,
            scoring,
            num_drawn,
            predicted=await self._predicted(body.prediction, model) if body.prediction else (),
            keeps_likeliest=keeps_likeliest,
        )
        request_id = body.rid or f"cmpl-{uuid.uuid4().hex}"
        plan = await self._plan(wanted, request_id, prompts)
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
        num_shown = 1 if body.n is None else body.n
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
        self, wanted: WantedOutput, request_id: str, prompts: Sequence[list[int]]
    ) -> Plan:
        body, options = wanted.body, wanted.body.stream_options
        if body.prompt_logprobs is not None and body.stream:
            message = "prompt_logprobs is set; it needs stream to be false"
            raise InvalidArgument.of("STREAM_ON", "prompt_logprobs", message)
        check_choices(self.settings, wanted.num_choices, len(prompts))
        if wanted.stop_strings or wanted.stop_regexes:
            check_stops(self.settings, "stop", wanted.stop_strings)
            check_stops(self.settings, "stop_regex", wanted.stop_regexes)
        if options is not None and not body.stream:
            message = "stream_options is set; it needs stream to be true"
            raise InvalidArgument.of("STREAM_OFF", "stream_options", message)
        requested, constraint = constraint_of(body), OutputConstraint()
        if requested is not None or wanted.output is not None:
            constraint = await _output_constraint(requested, wanted.output)
        if body.truncate_prompt_tokens is not None:
            limits = body, wanted.model, wanted.length.max_tokens
            prompts = [truncated(prompt, *limits) for prompt in prompts]
        generations = [
            generation
            for prompt in prompts
            for generation in wanted.generations(prompt, constraint.grammar, self.text)
        ]
        return Plan(
            request_id=request_id,
            created=int(time.time()),
            model=wanted.model.name,
            generations=tuple(generations),
            num_choices=wanted.num_choices,
            text=wanted.text_options(generations[0].stop, constraint.schemas),
            is_stream=body.stream,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.is_continuous,
            return_token_ids=body.return_token_ids,
            tokens_as_ids=body.return_tokens_as_token_ids,
            fingerprint=fingerprint(wanted.model),
            service_tier=None if body.service_tier is None else "default",
            num_shown=wanted.num_shown,
            shows_prompt_logprobs=body.prompt_logprobs is not None,
            grammar_field=constraint.field,
        )


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
