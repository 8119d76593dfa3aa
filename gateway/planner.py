"""Turns request bodies into plans: checked, tokenized, multiplied by prompts and choices."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gateway.constraints import HeldOutput, constraint_of, held_output
from gateway.failures import client_names
from gateway.generation import PromptScoring, TargetModel, fingerprint
from gateway.limits import RequestLimits, off_loop
from gateway.model_text import ModelText
from gateway.notices import give_notice
from gateway.output.style import ChatOutput, OutputStyle, ReasoningParser
from gateway.output.tools import Toolbox
from gateway.plan import OutputLength, Plan, WantedOutput
from gateway.prompts import (
    chat_text,
    check_token_ids,
    echoed_text,
    echoed_texts,
    given_prompts,
    longest_prompt,
    prompt_tokens,
    toolbox_of,
    truncated,
)
from gateway.refusals import refuse_unimplemented, unimplemented
from gateway.sampling import check_top_logprobs
from gateway.schema import ChatCompletionRequest, CompletionRequest, GenerationBody, Thinking
from shared.errors import InvalidArgument
from shared.tokens import ThinkingBudget

_PROMPT_IN_CHAT = {"prompt": "messages"}  # what a client knows its prompt by
_INLINE_GRAMMAR_BYTES = 1 << 16  # a walk through a schema of that length takes a millisecond
_INLINE_MESSAGES = 64  # a template writes that many in about a millisecond
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans what a body asks for.

    Raises (every method):
        InvalidArgument: the request can never be served; names the field, value and limit.
    """

    text: ModelText
    limits: RequestLimits

    async def chat(
        self,
        body: ChatCompletionRequest,
        name: str,
        model: TargetModel,
        trace_id: str,
        *,
        length: OutputLength | None = None,
    ) -> Plan:
        """Args:
        length: of the output; None takes it from the body.
        """
        refuse_unimplemented(body)
        if body.top_logprobs is not None and not body.logprobs:
            message = "top_logprobs is set; it needs logprobs to be true"
            raise InvalidArgument.of("LOGPROBS_OFF", "top_logprobs", message)
        top_logprobs = (
            check_top_logprobs("top_logprobs", body.top_logprobs or 0) if body.logprobs else None
        )
        toolbox = toolbox_of(body)
        style = self._style(body, toolbox)
        if body.input_ids is None:
            text = await self._chat_text(body, toolbox)
        else:
            check_token_ids("input_ids", body.input_ids, model)
            text = self.text.tokenizer.decode(body.input_ids, skip_special_tokens=False)
        output = style.output(text, toolbox)
        wanted = WantedOutput(
            body,
            model,
            trace_id,
            top_logprobs,
            length or _chat_length(body),
            output,
            thinking=self._thinking(body, text, model),
            predicted=await self._predicted(body, model),
        )
        request_id = body.rid or f"chatcmpl-{uuid.uuid4().hex}"
        prompt, names = body.input_ids, {"prompt": "input_ids"}
        if prompt is None:
            prompt, names = await self._encode(text, longest_prompt(body, model)), _PROMPT_IN_CHAT
        with client_names({**names, "max_tokens": wanted.length.field or "max_tokens"}):
            plan = await self._plan(wanted, request_id, name, [prompt])
        echoed = echoed_text(body)
        return replace(plan, echoed_texts=(echoed,)) if echoed else plan

    def _style(self, body: ChatCompletionRequest, toolbox: Toolbox | None) -> OutputStyle:
        """Returns how the output is read; thoughts that are not set apart are text like any."""
        style = self.text.style
        if body.separate_reasoning is not False or style.reasoning is ReasoningParser.NONE:
            return style
        if toolbox is not None or constraint_of(body) is not None:
            what = "separate_reasoning: false beside tools or a grammar"
            raise unimplemented("separate_reasoning", what)
        return replace(style, reasoning=ReasoningParser.NONE)

    async def _predicted(self, body: GenerationBody, model: TargetModel) -> Sequence[int]:
        """Returns the tokens that the output may hold in long runs; no more than can come."""
        if body.prediction is None:
            return ()
        with client_names({"prompt": "prediction"}):
            token_ids = await self.text.tokenizer.encode(
                body.prediction.text, add_special_tokens=False
            )
        return token_ids[: model.max_context_tokens]

    def thinking_budget(self, asked: int | None, thinking: Thinking | None) -> int | None:
        """Returns the bound of thoughts; that of `thinking` is given whatever the model is."""
        budget = None if thinking is None else thinking.budget_tokens
        if asked is not None or budget is None:
            return asked
        if self.text.style.reasoning is ReasoningParser.NONE:
            return None
        if self.text.thinking_marks is None:
            what = "thoughts of this model have no bound"
            give_notice(f"thinking.budget_tokens has no effect: {what}")
            return None
        return budget

    def _thinking(
        self, body: ChatCompletionRequest, prompt: str, model: TargetModel
    ) -> ThinkingBudget | None:
        """Returns the limit on reasoning; None where it is free, or does not think."""
        asked = self.thinking_budget(body.thinking_token_budget, body.thinking)
        read = self.text.style.output(prompt, None)
        if asked is None or read is None:
            return None
        marks = self.text.thinking_marks
        if marks is None:
            what = "thinking_token_budget of a model whose marks of reasoning are not single tokens"
            raise unimplemented("thinking_token_budget", what)
        max_tokens = min(asked, model.max_context_tokens)
        return ThinkingBudget(max_tokens, marks[1], None if read.starts_inside else marks[0])

    async def chat_prompt(self, body: ChatCompletionRequest) -> list[int]:
        """Returns the token ids of a chat."""
        return await self._encode(await self._chat_text(body, toolbox_of(body)))

    async def _chat_text(self, body: ChatCompletionRequest, toolbox: Toolbox | None) -> str:
        render = partial(chat_text, body, toolbox, self.text, self.limits)
        if len(body.messages) <= _INLINE_MESSAGES and body.chat_template is None:
            return render()
        return await off_loop("messages", render)

    async def _encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        with client_names(_PROMPT_IN_CHAT):
            # The template writes the special tokens itself.
            return await self.text.tokenizer.encode(
                text, add_special_tokens=False, max_tokens=max_tokens
            )

    async def completion(
        self,
        body: CompletionRequest,
        name: str,
        model: TargetModel,
        trace_id: str,
        *,
        scored_from: int | None = None,
        default_tokens: int = _DEFAULT_COMPLETION_TOKENS,
        keeps_likeliest: bool = False,
    ) -> Plan:
        """Args:
        scored_from: first prompt token that gets log probabilities, whatever is echoed.
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
            top_logprobs = check_top_logprobs("logprobs", body.logprobs)
        scoring = _scoring(body, top_logprobs, scored_from)
        if num_drawn is not None:  # the best are found by them
            top_logprobs = top_logprobs or 0
        tokenizer = self.text.tokenizer
        given = given_prompts(body)
        self.limits.check_prompts(len(given))
        prompts = [await prompt_tokens(prompt, body, model, tokenizer) for prompt in given]
        length = OutputLength(body.max_tokens, "max_tokens")
        if body.max_tokens is None:
            length = OutputLength(default_tokens)
        wanted = WantedOutput(
            body,
            model,
            trace_id,
            top_logprobs,
            length,
            None,
            scoring,
            num_drawn,
            predicted=await self._predicted(body, model),
            keeps_likeliest=keeps_likeliest,
        )
        request_id = body.rid or f"cmpl-{uuid.uuid4().hex}"
        plan = await self._plan(wanted, request_id, name, prompts)
        kept = [each.prompt_token_ids for each in plan.generations[:: plan.num_choices]]
        return replace(
            plan,
            echoed_texts=echoed_texts(body, prompts, kept, tokenizer),
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

    async def _plan(
        self, wanted: WantedOutput, request_id: str, name: str, prompts: Sequence[list[int]]
    ) -> Plan:
        body, options = wanted.body, wanted.body.stream_options
        if body.prompt_logprobs is not None and body.stream:
            message = "prompt_logprobs is set; it needs stream to be false"
            raise InvalidArgument.of("STREAM_ON", "prompt_logprobs", message)
        self.limits.check_choices(wanted.num_choices, len(prompts))
        self.limits.check_stop_strings(body.stop_strings)
        self.limits.check_stop_strings(body.stop_regexes, "stop_regex")
        if options is not None and not body.stream:
            message = "stream_options is set; it needs stream to be true"
            raise InvalidArgument.of("STREAM_OFF", "stream_options", message)
        held = await _held(body, wanted.output)
        generations = [
            generation
            for prompt in (
                truncated(each, body, wanted.model, wanted.num_asked) for each in prompts
            )
            for generation in wanted.generations(prompt, held.grammar, self.text)
        ]
        return Plan(
            request_id=request_id,
            created=int(time.time()),
            model=name,
            generations=tuple(generations),
            num_choices=wanted.num_choices,
            text=wanted.text_options(generations[0].stop, held.schemas),
            is_stream=body.stream,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.is_continuous,
            return_token_ids=body.return_token_ids,
            tokens_as_ids=body.return_tokens_as_token_ids,
            fingerprint=fingerprint(wanted.model),
            service_tier=None if body.service_tier is None else "default",
            num_shown=wanted.num_shown,
            shows_prompt_logprobs=body.prompt_logprobs is not None,
            grammar_field=held.field,
        )


async def _held(body: GenerationBody, output: ChatOutput | None) -> HeldOutput:
    constraint = constraint_of(body)
    hold = partial(held_output, constraint, output)
    size = 0 if constraint is None else constraint.grammar.size_bytes
    if output is not None and output.holds_calls(is_asked=constraint is not None):
        size += output.schemas_size
    held = hold() if size <= _INLINE_GRAMMAR_BYTES else await off_loop("the schemas", hold)
    for notice in held.notices:
        give_notice(notice)
    return held


def _chat_length(body: ChatCompletionRequest) -> OutputLength:
    if body.max_completion_tokens is not None:
        return OutputLength(body.max_completion_tokens, "max_completion_tokens")
    return OutputLength(body.max_tokens, "max_tokens")


def _scoring(
    body: CompletionRequest, top_logprobs: int | None, scored_from: int | None
) -> PromptScoring | None:
    """Returns what prompt tokens get: an echo with log probabilities holds the prompt's, too."""
    if scored_from is not None:
        return PromptScoring(scored_from, top_logprobs or 0)
    return PromptScoring(0, top_logprobs) if body.echo and top_logprobs is not None else None
