"""SGLang's `/generate`: its requests planned as completions, its answers and its route."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response

from gateway.answer import Answer
from gateway.bodies import finite, speculative_decoding
from gateway.choice import Choice, FinalChoice, Piece, check_field
from gateway.event_stream import DONE, event, respond
from gateway.failures import Aborted, Problem, client_names, json_response
from gateway.generation import TargetModel
from gateway.native.schema import GenerateAnswer, GenerateRequest, NativeSampling
from gateway.planner import Plan, Planner
from gateway.prompts import check_choices, check_prompts
from gateway.schema import CompletionRequest, KnownFields, SamplingFields, unimplemented
from gateway.serving import Gateway
from shared.errors import InvalidArgument, OutriderError
from shared.text import Tokenizer
from shared.tokens import FinishReason, TokenLogprobs

_Prompts = str | list[str] | list[int] | list[list[int]]

_DEFAULT_NEW_TOKENS = 128  # SGLang's
# The names of sampling fields here, by their names elsewhere.
_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_CONSTRAINTS = ("regex", "ebnf", "json_schema", "structural_tag")
_UNRENAMED = (*SamplingFields.model_fields, *_CONSTRAINTS, "n")
_SAMPLING_NAMES = {
    name: f"sampling_params.{_RENAMED.get(name, name)}" for name in (*_UNRENAMED, *_RENAMED)
}
_FIELDS = KnownFields.of_generation(
    harmless=frozenset(
        {"background", "custom_labels", "data_parallel_rank", "include_reasoning", "log_metrics"}
        | {"routed_dp_rank", "routing_key", "separate_reasoning"}
    ),
    unimplemented=frozenset(
        {"audio_data", "bootstrap_host", "bootstrap_room", "image_data"}
        | {"positional_embed_overrides", "video_data"}
    ),
    renamed=_SAMPLING_NAMES,
)
_SAMPLING_FIELDS = KnownFields.of_generation(
    harmless=frozenset({"skip_tokenizer_init", "spaces_between_special_tokens"}),
    unimplemented=frozenset({"beam_width", "ebnf_full_assistant"}),
    renamed=_RENAMED,
)
_OUTPUT_NAMES = {
    "logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
    "prompt_logprob_start": "logprob_start_len",
}

_Entries = list[list[Any]] | None
_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"model": GenerateAnswer | list[GenerateAnswer]}}


@dataclass(frozen=True, slots=True)
class WantedScores:
    """The log probabilities that a request wants for one prompt and its outputs.

    Attributes:
        num_top: alternatives per token; None without log probabilities.
        start: first prompt token with a log probability; None without any for the prompt.
        named: ids of further tokens to report; None if the request names none.
    """

    num_top: int | None
    start: int | None
    named: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class GeneratePlan:
    """A plan, and how `/generate` shows its answer.

    Attributes:
        is_batch: the answer is a list, and events of a stream have an index.
        scores: the wanted log probabilities, one element per prompt.
        spells_tokens: whether log probabilities come with the tokens' text.
    """

    completion: Plan
    is_batch: bool
    scores: tuple[WantedScores, ...]
    spells_tokens: bool

    def scores_of(self, index: int) -> WantedScores:
        """Returns the log probabilities that a choice reports."""
        return self.scores[index // self.completion.num_choices]


async def generate_plan(
    body: GenerateRequest, planner: Planner, model: TargetModel
) -> GeneratePlan:
    """Plans a request as one completion, or as one per prompt if their settings differ.

    Raises:
        InvalidArgument: the request can never be served; names the field as SGLang does.
    """
    _FIELDS.refuse(body)
    prompts, field = _prompts(body)
    is_list = not isinstance(prompts, str) and not (prompts and isinstance(prompts[0], int))
    count = max(len(prompts), 1) if is_list else 1
    samplings = _per_prompt("sampling_params", body.sampling_params, count)
    samplings = [sampling or NativeSampling() for sampling in samplings]
    scores = _scores(body, count)
    for sampling in samplings:
        _SAMPLING_FIELDS.refuse(sampling, "sampling_params.")
    if body.return_routed_experts and any(sampling.stop for sampling in samplings):
        # The gateway finds stop strings, before the target has reported the routed experts.
        message = "return_routed_experts is true; stop cannot be set beside it, stop_token_ids can"
        raise InvalidArgument.of("ROUTED_EXPERTS_STOP", "return_routed_experts", message)
    with client_names({**_SAMPLING_NAMES, **_OUTPUT_NAMES, "prompt": field}):
        settings = list(zip(samplings, scores, strict=True))
        if all(own == settings[0] for own in settings):
            batches = [prompts]
        else:
            check_prompts(planner.settings, count)
            batches = _split_batch(prompts)
        plans = [
            await planner.completion(
                _completion(body, sampling, batch, wanted),
                model,
                scored_from=wanted.start,
                default_tokens=_DEFAULT_NEW_TOKENS,
                keeps_likeliest=True,
            )
            for batch, (sampling, wanted) in zip(batches, settings, strict=False)
        ]
        plan = _merged(plans, planner)
    is_batch = len(plan.generations) > 1 or is_list
    wants_routes = body.return_routed_experts
    plan = replace(
        plan,
        request_id=body.rid or uuid.uuid4().hex,
        grammar_field=f"sampling_params.{plan.grammar_field}",
        generations=tuple(
            replace(generation, logprobs_after_temperature=True, wants_routes=wants_routes)
            for generation in plan.generations
        ),
    )
    return GeneratePlan(plan, is_batch, scores, body.return_text_in_logprobs)


def _split_batch(prompts: _Prompts) -> list[_Prompts]:
    """Returns each prompt of a batch as a batch of its own."""
    assert not isinstance(prompts, str)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    token_lists = [prompt for prompt in prompts if isinstance(prompt, list)]
    return [*([text] for text in texts), *([token_ids] for token_ids in token_lists)]


def _merged(plans: Sequence[Plan], planner: Planner) -> Plan:
    """Merges the plans of several prompts, each with its own settings, into one.

    Raises:
        InvalidArgument: the plans have different numbers of choices, or too many choices together.
    """
    first = plans[0]
    if any(plan.num_choices != first.num_choices for plan in plans):
        raise unimplemented("n", "n that differs within a batch")
    if len(plans) == 1:
        return first
    check_choices(planner.settings, first.num_choices, len(plans))
    return replace(
        first,
        generations=tuple(generation for plan in plans for generation in plan.generations),
        texts=tuple(plan.text for plan in plans for _ in plan.generations),
    )


def _completion(
    body: GenerateRequest, sampling: NativeSampling, prompts: _Prompts, scores: WantedScores
) -> CompletionRequest:
    fields = {name: getattr(sampling, name) for name in _UNRENAMED}
    renamed = {"min_tokens": sampling.min_new_tokens, "seed": sampling.sampling_seed}
    fields |= {name: value for name, value in renamed.items() if value is not None}
    return CompletionRequest(
        **fields,
        prompt=prompts,
        priority=body.priority,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        cache_salt=body.salt,
        prediction=body.prediction,
        stream=body.stream,
        max_tokens=sampling.max_new_tokens,
        logprobs=scores.num_top,
        logprob_token_ids=None if scores.named is None else list(scores.named),
        speculation=body.speculation,
    )


def _prompts(body: GenerateRequest) -> tuple[_Prompts, str]:
    """Returns the prompt or prompts, and the field they came in."""
    if body.text is not None and body.input_ids is None:
        return body.text, "text"
    if body.input_ids is not None and body.text is None:
        return body.input_ids, "input_ids"
    message = "one of text and input_ids must be given"
    raise InvalidArgument.of("PROMPT_AMBIGUOUS", "text", message)


def _scores(body: GenerateRequest, count: int) -> tuple[WantedScores, ...]:
    """Returns the wanted log probabilities of each prompt.

    A start of -1, SGLang's default, lies behind the prompt: no prompt token has one.
    """
    wants = _per_prompt("return_logprob", body.return_logprob, count)
    tops = _per_prompt("top_logprobs_num", body.top_logprobs_num, count)
    starts = _per_prompt("logprob_start_len", body.logprob_start_len, count)
    id_lists: Any = body.token_ids_logprob
    if id_lists is not None and all(isinstance(entry, int) for entry in id_lists):
        id_lists = [id_lists] * count
    id_lists = _per_prompt("token_ids_logprob", id_lists, count)
    scores = []
    for is_wanted, top, start, ids in zip(wants, tops, starts, id_lists, strict=True):
        if not is_wanted:
            scores.append(WantedScores(None, None, None))
            continue
        named = tuple(dict.fromkeys(ids)) if isinstance(ids, list) else None
        scores.append(WantedScores(top or 0, None if start in (None, -1) else start, named))
    return tuple(scores)


def _per_prompt(field: str, value: Any, count: int) -> list[Any]:
    """Returns the values of a field, one per prompt. A single value applies to all prompts.

    Raises:
        InvalidArgument: the field is a list whose length is not the number of prompts.
    """
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        message = f"{field} has {len(value)} entries for {count} prompts"
        raise InvalidArgument.of("FIELD_INVALID", field, message)
    return value


class GeneratedText:
    """One choice as `/generate` shows it: every event has the whole output so far.

    An aborted request ends with the output it had and the `finish_reason` abort.
    """

    def __init__(self, plan: GeneratePlan, choice: Choice, tokenizer: Tokenizer) -> None:
        self.choice = choice
        self._plan = plan
        self._wanted = plan.scores_of(choice.index)
        self._tokenizer = tokenizer
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[list[Any]] = []
        self._top: list[list[list[Any]] | None] = []
        self._named: list[list[list[Any]]] = []
        self._rounds: Sequence[dict[str, Any]] = ()
        self._prompt_fields: dict[str, orjson.Fragment] = {}
        self._num_prompt_scores = -1

    def add(self, piece: Piece) -> None:
        self._text += piece.text
        self._token_ids += piece.token_ids
        self._rounds = piece.rounds
        for score in piece.scores:
            self._logprobs.append(self._entry(score.token_id, score.logprobs.log_prob))
            top, named = self._split(score.logprobs)
            self._top.append(top)
            self._named.append(named)

    def body(self, aborted: Aborted | None = None) -> dict[str, Any]:
        """Returns the answer's JSON object."""
        index = {"index": self.choice.index} if self._plan.is_batch else {}
        return {
            "text": self._text,
            "output_ids": self._token_ids,
            "meta_info": self._meta_info(aborted),
            **index,
        }

    def _meta_info(self, aborted: Aborted | None) -> dict[str, Any]:
        choice = self.choice
        request_id = self._plan.completion.request_id
        prompt = self._plan.completion.generations[choice.index].prompt_token_ids
        info: dict[str, Any] = {
            "id": f"{request_id}_{choice.index}" if self._plan.is_batch else request_id,
            "finish_reason": _finish_reason(choice, aborted),
            "prompt_tokens": len(prompt),
            "completion_tokens": choice.num_output_tokens,
            "cached_tokens": choice.num_cached_tokens,
        }
        if choice.weight_spans:
            info["weight_version"] = choice.weight_spans[-1][0]
        if len(choice.weight_spans) > 1:
            info["weight_version_spans"] = choice.weight_spans
        if info["finish_reason"] is not None:
            info["e2e_latency"] = time.perf_counter() - choice.begun_s
            if choice.routes:
                info["routed_experts"] = base64.b64encode(choice.routes).decode()
        info |= self._prompt_score_fields(prompt)
        if self._wanted.num_top is not None:
            info["output_token_logprobs"] = self._logprobs
        if self._wanted.num_top:
            info["output_top_logprobs"] = self._top
        if self._wanted.named is not None:
            info["output_token_ids_logprobs"] = self._named
        if self._rounds:  # only the new rounds: all of them in every event would make megabytes
            info["spec_rounds"] = self._rounds
        return info | check_field(choice) | speculation_fields(choice)

    def _prompt_score_fields(self, prompt: Sequence[int]) -> dict[str, orjson.Fragment]:
        """Returns the fields with log probabilities of prompt tokens, encoded.

        Every event of a stream repeats these thousands of entries, so they are encoded once.
        """
        if self._num_prompt_scores == len(self.choice.prompt_scores):
            return self._prompt_fields
        inputs, wanted = self._inputs(prompt), self._wanted
        fields: dict[str, list[Any]] = {}
        if wanted.num_top is not None:
            fields["input_token_logprobs"] = [entry for entry, _, _ in inputs]
        if wanted.num_top:
            fields["input_top_logprobs"] = [top for _, top, _ in inputs]
        if wanted.named is not None:
            fields["input_token_ids_logprobs"] = [named for _, _, named in inputs]
        encoded = {name: orjson.Fragment(orjson.dumps(value)) for name, value in fields.items()}
        self._prompt_fields, self._num_prompt_scores = encoded, len(self.choice.prompt_scores)
        return encoded

    def _inputs(self, prompt: Sequence[int]) -> list[tuple[list[Any], _Entries, _Entries]]:
        """Returns (entry, top entries, named entries) of each scored prompt token.

        The first token of a prompt has no log probability: nothing precedes it.
        """
        scores = self.choice.prompt_scores
        inputs: list[tuple[list[Any], _Entries, _Entries]] = []
        if self._wanted.start == 0:
            inputs.append((self._entry(prompt[0], None), None, None))
        for token_id, score in zip(prompt[len(prompt) - len(scores) :], scores, strict=True):
            inputs.append((self._entry(token_id, score.log_prob), *self._split(score)))
        return inputs

    def _entry(self, token_id: int, log_prob: float | None) -> list[Any]:
        spelled = None
        if self._plan.spells_tokens:
            spelled = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return [None if log_prob is None else finite(log_prob), token_id, spelled]

    def _split(self, logprobs: TokenLogprobs) -> tuple[list[list[Any]], list[list[Any]]]:
        """Returns the entries of the likeliest tokens, and of the tokens that the request named."""
        entries = [self._entry(token_id, log_prob) for token_id, log_prob in logprobs.top]
        num_named = len(self._wanted.named or ())
        return entries[: len(entries) - num_named], entries[len(entries) - num_named :]


class GenerateEncoder:
    """`/generate`."""

    def __init__(self, plan: GeneratePlan, choices: Sequence[Choice], tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._texts = [GeneratedText(plan, choice, tokenizer) for choice in choices]

    def opening(self, choice: Choice) -> bytes:
        return b""

    def news(self, choice: Choice) -> bytes:
        piece = choice.take()
        if piece is None and choice.finish_reason is None:
            return b""
        text = self._texts[choice.index]
        text.add(piece or Piece(""))
        return event(text.body())

    def closing(self, choices: tuple[Choice, ...]) -> bytes:
        return DONE

    def failure(self, error: OutriderError) -> bytes:
        if not isinstance(error, Aborted):
            return event(Problem.of(error).openai_body())
        running = [text for text in self._texts if text.choice.finish_reason is None]
        for text in running:
            text.add(text.choice.cut())
        return b"".join([event(text.body(error)) for text in running]) + DONE

    def whole(self, choices: Sequence[FinalChoice]) -> Any:
        for text, final_choice in zip(self._texts, choices, strict=True):
            text.add(final_choice.piece)
        return self._bodies([text.body() for text in self._texts])

    def cut(self, aborted: Aborted) -> Any:
        """Returns the JSON of an aborted answer that is not streamed: the output so far."""
        for text in self._texts:
            text.add(text.choice.cut())
        return self._bodies(
            [text.body(None if text.choice.finish_reason else aborted) for text in self._texts]
        )

    def _bodies(self, bodies: list[dict[str, Any]]) -> Any:
        return bodies if self._plan.is_batch else bodies[0]


def speculation_fields(choice: Choice) -> dict[str, Any]:
    """Returns the speculation counters under the names of old and new releases of SGLang.

    As in SGLang, the fields are absent when no tree was verified.
    """
    figures, stats = speculative_decoding([choice]), choice.stats
    if figures is None:
        return {}
    histogram = list(stats.histogram)
    return {
        "spec_verify_ct": stats.num_verified_rounds,
        "spec_accept_length": figures["mean_acceptance_length"],
        "spec_accept_rate": figures["draft_acceptance_rate"],
        "spec_accept_token_num": stats.num_accepted,
        "spec_draft_token_num": stats.num_drafted,
        "spec_accept_histogram": histogram,
        "spec_num_correct_drafts": stats.num_accepted,
        "spec_num_proposed_drafts": stats.num_drafted,
        "spec_accepted_drafts": stats.num_accepted,
        "spec_proposed_drafts": stats.num_drafted,
        "spec_correct_drafts_histogram": histogram,
    }


def _finish_reason(choice: Choice, aborted: Aborted | None) -> dict[str, Any] | None:
    if aborted is not None:
        return {"type": "abort", "message": aborted.message}
    if choice.finish_reason is None:
        return None
    if choice.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": choice.num_output_tokens}
    matched = choice.matched_stop
    return {"type": "stop", "matched": choice.stop_token_id if matched is None else matched}


def add_generate_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the route."""
    tokenizer = gateway.text.tokenizer

    @app.put("/generate", tags=["sglang"], responses=_ANSWERS)
    @app.post("/generate", tags=["sglang"], responses=_ANSWERS)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        plan = await generate_plan(body, gateway.planner, gateway.pool.model(body.model))
        answer = Answer(plan.completion, gateway, "generate")
        encoder = GenerateEncoder(plan, answer.choices, tokenizer)
        try:
            return await respond(answer, encoder, request.receive)
        except Aborted as error:
            return json_response(encoder.cut(error))
