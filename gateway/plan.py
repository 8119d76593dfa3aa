"""One HTTP request, checked and tokenized: the generations it asks for and how to answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gateway.chat_prompt import template_messages, toolbox_of, with_tools_prompt
from gateway.constraints import constraint_of
from gateway.generation import Generation, PromptScoring, TargetModel
from gateway.limits import RequestLimits
from gateway.output.style import ChatOutput
from gateway.output.tools import Toolbox
from gateway.refusals import refuse_unimplemented
from gateway.sampling import (
    check_algorithm,
    check_num_steps,
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
from gateway.text.chat_template import ChatTemplate
from gateway.text.model_text import ModelText
from shared.errors import InvalidArgument
from shared.grammar import Grammar
from shared.seeds import choice_seed
from shared.tokens import StopParams

_PRIORITY_LIMIT = 2**31
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the output of every choice becomes text.

    Attributes:
        hidden_token_ids: tokens that end generation and are not shown, unless a stop is.
        output: how calls and reasoning are told from text; None when all of it is text.
        include_reasoning: whether reasoning is shown.
        hides_output: the request asks for no token at all, only for what a target says of its
            prompt. A target always draws one.
    """

    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    hidden_token_ids: frozenset[int] = frozenset()
    with_logprobs: bool = False
    with_rounds: bool = False
    output: ChatOutput | None = None
    include_reasoning: bool = True
    hides_output: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What one HTTP request asks for.

    Attributes:
        request_id: shown to the client as `id`.
        created: Unix time in seconds.
        generations: in order of choice index, which is prompt · `num_choices` + choice.
        num_choices: choices drawn for each prompt: `n`, or `best_of`.
        num_shown: how many of them are the answer.
        echoes_scores: the log probabilities of an echo hold those of the prompt.
        shows_logprobs: False when log probabilities only serve to find the best choices.
        shows_prompt_logprobs: the answer has vLLM's `prompt_logprobs`.
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
    grammar_field: str = ""
    num_shown: int = 1
    echoes_scores: bool = False
    shows_prompt_logprobs: bool = False
    shows_logprobs: bool = True
    echoed_texts: tuple[str, ...] = field(default=())

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the request; a prompt counts once, whatever `n`."""
        prompts = self.generations[:: self.num_choices]
        return sum(len(generation.prompt_token_ids) for generation in prompts)


@dataclass(frozen=True, slots=True)
class Planner:
    """Turns request bodies into plans.

    Raises (every method):
        InvalidArgument: the request can never be served; names the field, value and limit.
    """

    text: ModelText
    limits: RequestLimits

    async def chat(
        self, body: ChatCompletionRequest, name: str, model: TargetModel, trace_id: str
    ) -> Plan:
        refuse_unimplemented(body)
        if body.top_logprobs is not None and not body.logprobs:
            message = "top_logprobs is set; it needs logprobs to be true"
            raise InvalidArgument.of("LOGPROBS_OFF", "top_logprobs", message)
        top_logprobs = (
            check_top_logprobs("top_logprobs", body.top_logprobs or 0) if body.logprobs else None
        )
        toolbox = toolbox_of(body)
        text = self._chat_text(body, toolbox)
        # The template writes the special tokens itself.
        prompt = await self.text.tokenizer.encode(text, add_special_tokens=False)
        max_tokens = body.max_tokens
        if body.max_completion_tokens is not None:
            max_tokens = body.max_completion_tokens
        output = self.text.style.output(text, toolbox)
        draft = _Draft(body, model, trace_id, top_logprobs, max_tokens, output)
        return self._plan(draft, f"chatcmpl-{uuid.uuid4().hex}", name, [prompt])

    async def completion(
        self, body: CompletionRequest, name: str, model: TargetModel, trace_id: str
    ) -> Plan:
        refuse_unimplemented(body)
        num_drawn = self._num_drawn(body)
        top_logprobs = None
        if body.logprobs is not None:
            top_logprobs = check_top_logprobs("logprobs", body.logprobs)
        scoring = _echo_scoring(body, top_logprobs)
        if num_drawn is not None:  # the best are found by them
            top_logprobs = top_logprobs or 0
        prompts = await self._prompts(body, model)
        max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        draft = _Draft(body, model, trace_id, top_logprobs, max_tokens, None, scoring, num_drawn)
        plan = self._plan(draft, f"cmpl-{uuid.uuid4().hex}", name, prompts)
        return replace(
            plan,
            echoed_texts=self._echoed_texts(body, prompts),
            echoes_scores=body.echo and body.logprobs is not None,
            shows_logprobs=body.logprobs is not None,
        )

    def _num_drawn(self, body: CompletionRequest) -> int | None:
        """Returns `best_of`; None where it is `n`."""
        num_shown = 1 if body.n is None else body.n
        if body.best_of is None or body.best_of == num_shown:
            return None
        if not num_shown < body.best_of <= self.limits.max_choices:
            limit = f"[n={num_shown}, {self.limits.max_choices}]"
            raise InvalidArgument.out_of_range("best_of", body.best_of, limit)
        if body.stream:
            message = "best_of is above n; the best are known at the end, so stream must be false"
            raise InvalidArgument.of("STREAM_ON", "best_of", message)
        return body.best_of

    async def chat_prompt(self, body: ChatCompletionRequest) -> list[int]:
        """Returns the token ids of a chat."""
        text = self._chat_text(body, toolbox_of(body))
        return await self.text.tokenizer.encode(text, add_special_tokens=False)

    def _chat_text(self, body: ChatCompletionRequest, toolbox: Toolbox | None) -> str:
        if not body.messages:
            raise InvalidArgument.of("PROMPT_EMPTY", "messages", "messages is empty")
        if self.text.template is None:
            message = "the model has no chat template; use /v1/completions"
            raise InvalidArgument.of("CHAT_TEMPLATE_MISSING", "messages", message)
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        template = self._template(body.chat_template, self.text.template)
        messages = template_messages(body.messages)
        if toolbox is not None:
            self.text.style.check_tools()
            variables["tools"] = [tool.definition for tool in toolbox.tools]
            if not template.reads_tools:
                messages = with_tools_prompt(messages, toolbox)
        return template.render(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=variables,
        )

    def _template(self, source: str | None, own: ChatTemplate) -> ChatTemplate:
        """Returns the template a request brings, if it may bring one, else the model's own."""
        if source is None:
            return own
        limit = self.limits.max_template_characters
        if limit == 0:
            message = "chat_template is refused: this gateway takes no templates from requests"
            raise InvalidArgument.of("REQUEST_TEMPLATES_OFF", "chat_template", message)
        if len(source) > limit:
            message = f"chat_template has {len(source):,} characters; it may have {limit:,}"
            raise InvalidArgument.of("CHAT_TEMPLATE_TOO_LARGE", "chat_template", message)
        return own.replaced(source)

    async def _prompts(self, body: CompletionRequest, model: TargetModel) -> list[list[int]]:
        prompts = _prompt_list(body.prompt)
        limit = self.limits.max_prompts
        if not 1 <= len(prompts) <= limit:
            message = f"prompt holds {len(prompts)} prompts; it must hold [1, {limit}]"
            raise InvalidArgument.of("PROMPTS_OUT_OF_RANGE", "prompt", message)
        return [await self._prompt(prompt, body, model) for prompt in prompts]

    async def _prompt(
        self, prompt: str | list[int], body: CompletionRequest, model: TargetModel
    ) -> list[int]:
        if isinstance(prompt, str):
            add_special_tokens = body.add_special_tokens is not False
            return await self.text.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        for token_id in (min(prompt, default=0), max(prompt, default=0)):
            if not 0 <= token_id < model.vocab_size:
                message = f"prompt holds token {token_id}; ids must be in [0, {model.vocab_size})"
                raise InvalidArgument.of("TOKEN_OUT_OF_RANGE", "prompt", message)
        return prompt

    def _echoed_texts(
        self, body: CompletionRequest, prompts: Sequence[Sequence[int]]
    ) -> tuple[str, ...]:
        """A string is echoed as it was sent; token ids are echoed as the text they stand for."""
        if not body.echo:
            return ()
        given = _prompt_list(body.prompt)
        return tuple(
            prompt if isinstance(prompt, str) else self.text.tokenizer.decode(token_ids)
            for prompt, token_ids in zip(given, prompts, strict=True)
        )

    def _plan(
        self, draft: _Draft, request_id: str, name: str, prompts: Sequence[list[int]]
    ) -> Plan:
        body = draft.body
        num_shown = 1 if body.n is None else body.n
        num_choices = num_shown if draft.num_drawn is None else draft.num_drawn
        if body.prompt_logprobs is not None and body.stream:
            message = "prompt_logprobs is set; it needs stream to be false"
            raise InvalidArgument.of("STREAM_ON", "prompt_logprobs", message)
        self._check_counts(body, num_choices, len(prompts))
        options = body.stream_options
        if options is not None and not body.stream:
            message = "stream_options is set; it needs stream to be true"
            raise InvalidArgument.of("STREAM_OFF", "stream_options", message)
        constraint = constraint_of(body)
        grammar = None if constraint is None else constraint.grammar
        if draft.output is not None:
            grammar = draft.output.grammar(grammar)
        generations = [
            generation
            for prompt in prompts
            for generation in self._generations(draft, prompt, num_choices, grammar)
        ]
        return Plan(
            request_id=request_id,
            created=int(time.time()),
            model=name,
            generations=tuple(generations),
            num_choices=num_choices,
            text=draft.text_options(generations[0].stop),
            is_stream=body.stream,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
            return_token_ids=body.return_token_ids,
            num_shown=num_shown,
            shows_prompt_logprobs=body.prompt_logprobs is not None,
            grammar_field="tools" if constraint is None else constraint.field,
        )

    def _generations(
        self, draft: _Draft, prompt: list[int], num_choices: int, grammar: Grammar | None
    ) -> list[Generation]:
        body = draft.body
        speculation = body.speculation or Speculation()
        sampling = sampling_params(body, self.text.defaults, draft.model)
        generation = Generation(
            prompt_token_ids=prompt,
            sampling=sampling,
            stop=stop_params(body, draft.num_asked, len(prompt), draft.model),
            has_seed=body.seed is not None,
            top_logprobs=draft.top_logprobs,
            is_speculation_disabled=speculation.disable,
            draft_algorithm=check_algorithm(speculation),
            num_draft_steps=check_num_steps(speculation),
            wants_rounds=speculation.trace,
            grammar=grammar,
            priority=_priority(body),
            prompt_scoring=draft.prompt_scoring,
            trace_id=draft.trace_id,
        )
        scoring = generation.prompt_scoring
        if scoring is not None and not 0 <= scoring.start < len(prompt):
            raise InvalidArgument.out_of_range(
                "prompt_logprob_start", scoring.start, f"[0, {len(prompt) - 1}]"
            )
        seeds = (choice_seed(sampling.seed, choice) for choice in range(num_choices))
        return [replace(generation, sampling=replace(sampling, seed=seed)) for seed in seeds]

    def _check_counts(self, body: GenerationBody, num_choices: int, num_prompts: int) -> None:
        limits = self.limits
        if not 1 <= num_choices <= limits.max_choices:
            raise InvalidArgument.out_of_range("n", num_choices, f"[1, {limits.max_choices}]")
        if num_choices * num_prompts > limits.max_generations:
            message = (
                f"the request asks for {num_choices} choices of {num_prompts} prompts; "
                f"n times prompts must be at most {limits.max_generations}"
            )
            raise InvalidArgument.of("CHOICES_OUT_OF_RANGE", "n", message)
        stops = body.stop_strings
        if len(stops) > limits.max_stop_strings:
            limit = f"at most {limits.max_stop_strings} strings"
            raise InvalidArgument.of("STOP_OUT_OF_RANGE", "stop", f"stop has {len(stops)}; {limit}")
        for stop in stops:
            if not 1 <= len(stop) <= limits.max_stop_characters:
                limit = f"[1, {limits.max_stop_characters}]"
                message = f"a stop string has {len(stop)} characters; it must have {limit}"
                raise InvalidArgument.of("STOP_OUT_OF_RANGE", "stop", message)


@dataclass(frozen=True, slots=True)
class _Draft:
    """What both kinds of body have been reduced to, before prompts and choices multiply it."""

    body: GenerationBody
    model: TargetModel
    trace_id: str
    top_logprobs: int | None
    max_tokens: int | None
    output: ChatOutput | None = None
    echo_scoring: PromptScoring | None = None
    num_drawn: int | None = None

    @property
    def prompt_scoring(self) -> PromptScoring | None:
        """What `prompt_logprobs` asks for, or an echo with log probabilities."""
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return self.echo_scoring
        return PromptScoring(0, check_top_logprobs("prompt_logprobs", num_top))

    @property
    def hides_output(self) -> bool:
        """Whether no output is asked for, but what the target says of the prompt."""
        is_echo = isinstance(self.body, CompletionRequest) and self.body.echo
        return self.max_tokens == 0 and (is_echo or self.prompt_scoring is not None)

    @property
    def num_asked(self) -> int | None:
        """Tokens asked of the target, which draws one at least."""
        return 1 if self.hides_output else self.max_tokens

    @property
    def include_reasoning(self) -> bool:
        return not isinstance(self.body, ChatCompletionRequest) or (
            self.body.include_reasoning is not False
        )

    def text_options(self, stop: StopParams) -> TextOptions:
        body = self.body
        eos = frozenset() if body.ignore_eos else self.model.eos_token_ids
        hidden = frozenset() if body.include_stop_str_in_output else stop.stop_token_ids | eos
        return TextOptions(
            stop_strings=body.stop_strings,
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens is not False,
            hidden_token_ids=hidden,
            with_logprobs=self.top_logprobs is not None,
            with_rounds=body.speculation is not None and body.speculation.trace,
            output=self.output,
            include_reasoning=self.include_reasoning,
            hides_output=self.hides_output,
        )


def _echo_scoring(body: CompletionRequest, top_logprobs: int | None) -> PromptScoring | None:
    """Returns what prompt tokens get: an echo with log probabilities holds the prompt's, too."""
    if body.prompt_logprob_start is not None:
        return PromptScoring(body.prompt_logprob_start, top_logprobs or 0)
    return PromptScoring(0, top_logprobs) if body.echo and top_logprobs is not None else None


def _priority(body: GenerationBody) -> int:
    priority = body.priority or 0
    if not -_PRIORITY_LIMIT <= priority < _PRIORITY_LIMIT:
        raise InvalidArgument.out_of_range("priority", priority, "[-2^31, 2^31)")
    return priority


def _prompt_list(
    prompt: str | list[str] | list[int] | list[list[int]],
) -> Sequence[str | list[int]]:
    """Returns the prompts of a request: a list of numbers is one prompt, not many."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token_id for token_id in prompt if isinstance(token_id, int)]]
    return [item for item in prompt if not isinstance(item, int)]
