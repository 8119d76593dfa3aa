"""One HTTP request, checked and tokenized: the generations it asks for and how to answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gateway.generation import Generation, TargetModel
from gateway.limits import RequestLimits
from gateway.refusals import refuse_unimplemented, refuse_unimplemented_message
from gateway.sampling import check_top_logprobs, choice_seed, sampling_params, stop_params
from gateway.schema import ChatCompletionRequest, ChatMessage, CompletionRequest, GenerationBody
from gateway.text.model_text import ModelText
from shared.errors import InvalidArgument
from shared.tokens import StopParams

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the output of every choice becomes text.

    Attributes:
        hidden_token_ids: tokens that end generation and are not shown, unless a stop is.
    """

    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    hidden_token_ids: frozenset[int] = frozenset()
    with_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What one HTTP request asks for.

    Attributes:
        request_id: shown to the client as `id`.
        created: Unix time in seconds.
        generations: in order of choice index, which is prompt · `num_choices` + choice.
        num_choices: choices for each prompt (`n`).
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
        prompt = await self.chat_prompt(body)
        max_tokens = body.max_tokens
        if body.max_completion_tokens is not None:
            max_tokens = body.max_completion_tokens
        draft = _Draft(body, model, trace_id, top_logprobs, max_tokens)
        return self._plan(draft, f"chatcmpl-{uuid.uuid4().hex}", name, [prompt])

    async def completion(
        self, body: CompletionRequest, name: str, model: TargetModel, trace_id: str
    ) -> Plan:
        refuse_unimplemented(body)
        if body.best_of is not None and body.best_of != (body.n or 1):
            message = f"best_of is {body.best_of}; only best_of = n = {body.n or 1} is implemented"
            raise InvalidArgument.of("NOT_IMPLEMENTED", "best_of", message)
        top_logprobs = None
        if body.logprobs is not None:
            top_logprobs = check_top_logprobs("logprobs", body.logprobs)
        prompts = await self._prompts(body, model)
        max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        draft = _Draft(body, model, trace_id, top_logprobs, max_tokens)
        plan = self._plan(draft, f"cmpl-{uuid.uuid4().hex}", name, prompts)
        return replace(plan, echoed_texts=self._echoed_texts(body, prompts))

    async def chat_prompt(self, body: ChatCompletionRequest) -> list[int]:
        """Returns the token ids of a chat."""
        if not body.messages:
            raise InvalidArgument.of("PROMPT_EMPTY", "messages", "messages is empty")
        if self.text.template is None:
            message = "the model has no chat template; use /v1/completions"
            raise InvalidArgument.of("CHAT_TEMPLATE_MISSING", "messages", message)
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        prompt = self.text.template.render(
            [_template_message(i, message) for i, message in enumerate(body.messages)],
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=variables,
        )
        # The template writes the special tokens itself.
        return await self.text.tokenizer.encode(prompt, add_special_tokens=False)

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
        num_choices = 1 if body.n is None else body.n
        self._check_counts(body, num_choices, len(prompts))
        options = body.stream_options
        if options is not None and not body.stream:
            message = "stream_options is set; it needs stream to be true"
            raise InvalidArgument.of("STREAM_OFF", "stream_options", message)
        generations = [
            generation
            for prompt in prompts
            for generation in self._generations(draft, prompt, num_choices)
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
        )

    def _generations(self, draft: _Draft, prompt: list[int], num_choices: int) -> list[Generation]:
        body = draft.body
        sampling = sampling_params(body, self.text.defaults, draft.model)
        generation = Generation(
            prompt_token_ids=prompt,
            sampling=sampling,
            stop=stop_params(body, draft.max_tokens, len(prompt), draft.model),
            has_seed=body.seed is not None,
            top_logprobs=draft.top_logprobs,
            is_speculation_disabled=body.speculation is not None and body.speculation.disable,
            trace_id=draft.trace_id,
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
        )


def _prompt_list(
    prompt: str | list[str] | list[int] | list[list[int]],
) -> Sequence[str | list[int]]:
    """Returns the prompts of a request: a list of numbers is one prompt, not many."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token_id for token_id in prompt if isinstance(token_id, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def _template_message(index: int, message: ChatMessage) -> dict[str, str]:
    """Returns the message as templates read it; `developer` is a newer name for `system`."""
    refuse_unimplemented_message(index, message)
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text or "" for part in content)
    role = "system" if message.role == "developer" else message.role
    result = {"role": role, "content": content or ""}
    if message.name is not None:
        result["name"] = message.name
    return result
