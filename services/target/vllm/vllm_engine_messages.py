"""Messages of the VllmEngine contract: requests, responses, model information and load."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from services.target.requests.admission import RequestRecord
from services.target.requests.request import GenerationRequest, ModelLimits
from services.target.settings import TargetSettings
from services.target.step_report import EngineGauges
from services.target.vllm.open_choices import ChoiceOutput
from shared.errors import InvalidArgument
from shared.generation import Delta, PromptScoring, check_num_top
from shared.grammar import Grammar, GrammarKind
from shared.models.config_file import CONFIG_FILE, ConfigFile
from shared.pb.vllm.grpc.engine import vllm_engine_pb2 as pb
from shared.sampling_defaults import SamplingDefaults, choice_seed, drawn_seed
from shared.tokens import FinishReason, SamplingParams, StopParams, TokenLogprobs

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
_NO_MEDIA = "this target takes text and tokens only"
_NO_TRANSFER = "this target neither takes nor gives keys and values of other engines"
_REFUSED = {
    "kv_transfer_params": _NO_TRANSFER,
    "kv_transfer_params_json": _NO_TRANSFER,
    "mm_inputs": _NO_MEDIA,
    "extra_mm_inputs": _NO_MEDIA,
    "media_refs": _NO_MEDIA,
}
_ANY_OBJECT = '{"type": "object"}'


def check_supported(message: pb.GenerateRequest) -> None:
    """Raises:
    InvalidArgument: a field is set that this target does not support; names the field.
    """
    for field, value in message.ListFields():
        if field.name in _REFUSED:
            why = _REFUSED[field.name]
            raise InvalidArgument.of("FIELD_UNSUPPORTED", field.name, f"{field.name} is set: {why}")
        if field.name == "data_parallel_rank" and value != 0:
            raise InvalidArgument.out_of_range("data_parallel_rank", value, "0: there is one rank")


def prompt_within(
    token_ids: Sequence[int], params: pb.SamplingParams, limits: ModelLimits
) -> tuple[int, ...]:
    """Returns the prompt, or the end of it that `truncate_prompt_tokens` keeps.

    Raises:
        InvalidArgument: the prompt or `truncate_prompt_tokens` cannot be served.
    """
    prompt = tuple(token_ids)
    if params.HasField("truncate_prompt_tokens"):
        num_kept = params.truncate_prompt_tokens
        if num_kept < 1 and num_kept != -1:
            raise InvalidArgument.out_of_range(
                "truncate_prompt_tokens", num_kept, "-1 or at least 1"
            )
        prompt = prompt[-(limits.max_sequence_tokens - 1 if num_kept == -1 else num_kept) :]
    limits.check_prompt(prompt)
    return prompt


def generation_request(
    prompt: tuple[int, ...],
    params: pb.SamplingParams,
    record: RequestRecord,
    limits: ModelLimits,
    arrival_s: float,
) -> GenerationRequest:
    """Returns the request of the first output, without its grammar.

    Raises:
        InvalidArgument: a field is out of range.
    """
    top_logprobs = scoring = None
    if params.HasField("logprobs"):
        top_logprobs = check_num_top("logprobs", params.logprobs)
    if params.HasField("prompt_logprobs"):
        scoring = PromptScoring(0, check_num_top("prompt_logprobs", params.prompt_logprobs))
    return GenerationRequest(
        request_id=record.request_id,
        traceparent=record.traceparent,
        prompt_token_ids=prompt,
        sampling=_sampling(params, limits),
        stop=_stop(params, limits.max_sequence_tokens - len(prompt)),
        arrival_s=arrival_s,
        top_logprobs=top_logprobs,
        prompt_scoring=scoring,
    )


def choice_requests(first: GenerationRequest, params: pb.SamplingParams) -> list[GenerationRequest]:
    """Returns the requests of the `n` outputs, which differ in their seeds.

    Raises:
        InvalidArgument: `n` is out of range.
    """
    num_choices = params.n or 1
    if num_choices > MAX_CHOICES:
        raise InvalidArgument.out_of_range("n", num_choices, f"[1, {MAX_CHOICES}]")
    sampling = first.sampling
    seeds = [choice_seed(sampling.seed, index) for index in range(num_choices)]
    return [replace(first, sampling=replace(sampling, seed=seed)) for seed in seeds]


def _sampling(params: pb.SamplingParams, limits: ModelLimits) -> SamplingParams:
    """Fields without presence are off at 0."""
    return SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        # A larger top-k keeps all tokens, and may not fit the device's integers.
        top_k=0 if params.top_k >= limits.vocab_size else params.top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        logit_bias=MappingProxyType(dict(params.logit_bias)),
        seed=params.seed if params.HasField("seed") else drawn_seed(),
    )


def _stop(params: pb.SamplingParams, num_left: int) -> StopParams:
    """Returns the stop parameters without strings; the context has `num_left` ≥ 1 tokens left."""
    stop = StopParams(
        max_output_tokens=params.max_tokens if params.HasField("max_tokens") else num_left,
        min_output_tokens=params.min_tokens,
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
    )
    return stop.within(num_left)


def stop_strings(params: pb.SamplingParams) -> tuple[str, ...]:
    """Returns the stop strings.

    Raises:
        InvalidArgument: there are too many, or one is empty or too long.
    """
    if len(params.stop) > MAX_STOP_STRINGS:
        limit = f"at most {MAX_STOP_STRINGS} strings"
        message = f"stop has {len(params.stop)} strings; {limit} are accepted"
        raise InvalidArgument.of("STOP_OUT_OF_RANGE", "stop", message)
    for text in params.stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            limit = f"[1, {MAX_STOP_CHARACTERS}]"
            message = f"a stop string has {len(text)} characters; it must have {limit}"
            raise InvalidArgument.of("STOP_OUT_OF_RANGE", "stop", message)
    return tuple(params.stop)


def grammar_from_message(params: pb.SamplingParams) -> Grammar | None:
    """Returns the grammar that the output must match; None allows any output."""
    match params.WhichOneof("constraint"):
        case "json_schema":
            return Grammar.of(GrammarKind.JSON_SCHEMA, params.json_schema)
        case "regex":
            return Grammar.of(GrammarKind.REGEX, params.regex)
        case "grammar":
            return Grammar.of(GrammarKind.EBNF, params.grammar)
        case "structural_tag":
            return Grammar.of(GrammarKind.STRUCTURAL_TAG, params.structural_tag)
        case "choice":
            return Grammar(GrammarKind.CHOICES, tuple(params.choice.choices))
        case "json_object" if params.json_object:
            return Grammar.of(GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
    return None


_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}


def chunk_message(choice: ChoiceOutput, delta: Delta) -> pb.GenerateResponse:
    """Returns the message of the tokens that were last added to an output."""
    is_first = len(choice.token_ids) == len(delta.token_ids)
    chunk = pb.GenerateStreamChunk(
        token_ids=delta.token_ids,
        prompt_tokens=len(choice.request.prompt_token_ids),
        completion_tokens=len(delta.token_ids),
        cached_tokens=choice.num_cached_tokens,
        output_logprobs=_output_logprobs(choice, delta.token_ids, delta.logprobs),
        input_logprobs=_input_logprobs(choice) if is_first else None,
        index=choice.index,
    )
    return pb.GenerateResponse(chunk=chunk)


def complete_message(choice: ChoiceOutput, *, is_streamed: bool) -> pb.GenerateResponse:
    """Returns the message of an output that has ended.

    Args:
        is_streamed: log probabilities were sent with the tokens.
    """
    finished = choice.finished
    assert finished is not None
    complete = pb.GenerateComplete(
        output_ids=choice.token_ids,
        finish_reason=_FINISH_REASONS[finished.reason],
        prompt_tokens=len(choice.request.prompt_token_ids),
        completion_tokens=len(choice.token_ids),
        cached_tokens=choice.num_cached_tokens,
        index=choice.index,
        spec_accepted_tokens=choice.num_accepted,
        spec_draft_tokens=choice.num_drafted,
    )
    if not is_streamed:
        output = _output_logprobs(choice, choice.token_ids, choice.logprobs)
        prompt = _input_logprobs(choice)
        complete.MergeFrom(pb.GenerateComplete(output_logprobs=output, input_logprobs=prompt))
    if choice.stop_string is not None:
        complete.matched_stop_str = choice.stop_string
    elif finished.stop_token_id in choice.request.stop.stop_token_ids:
        complete.matched_token_id = finished.stop_token_id
    return pb.GenerateResponse(complete=complete)


def _output_logprobs(
    choice: ChoiceOutput, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> pb.OutputLogProbs | None:
    if choice.request.top_logprobs is None:
        return None
    tops = map(_top, logprobs) if choice.request.top_logprobs else ()
    return pb.OutputLogProbs(
        token_logprobs=[token.log_prob for token in logprobs],
        token_ids=token_ids,
        top_logprobs=tops,
    )


def _input_logprobs(choice: ChoiceOutput) -> pb.InputLogProbs | None:
    scoring = choice.request.prompt_scoring
    if scoring is None:
        return None
    scores = choice.prompt_scores
    first = pb.InputTokenLogProb()
    tops = [pb.TopLogProbs(), *map(_top, scores)] if scoring.num_top else ()
    return pb.InputLogProbs(
        token_logprobs=[first, *(pb.InputTokenLogProb(value=score.log_prob) for score in scores)],
        token_ids=choice.request.prompt_token_ids[: len(scores) + 1],
        top_logprobs=tops,
    )


def _top(logprobs: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        values=[log_prob for _, log_prob in logprobs.top],
        token_ids=[token_id for token_id, _ in logprobs.top],
    )


def model_info_message(settings: TargetSettings, limits: ModelLimits) -> pb.GetModelInfoResponse:
    """Returns the message about the served model.

    Raises:
        CheckpointError: a file of the model folder cannot be used.
    """
    config = ConfigFile.read(settings.model_path / CONFIG_FILE)
    usual = dataclasses.asdict(SamplingDefaults())
    of_model = dataclasses.asdict(SamplingDefaults.read(settings.model_path))
    changed = {name: value for name, value in of_model.items() if value != usual[name]}
    return pb.GetModelInfoResponse(
        model_path=settings.model_id,
        served_model_name=settings.model_id,
        is_generation=True,
        max_context_length=limits.max_sequence_tokens,
        max_req_input_len=limits.max_sequence_tokens - 1,
        vocab_size=limits.vocab_size,
        model_type=config.text("model_type", ""),
        architectures=config.texts("architectures"),
        eos_token_ids=sorted(limits.eos_token_ids),
        pad_token_id=next(iter(config.integers("pad_token_id")), 0),
        bos_token_id=next(iter(config.integers("bos_token_id")), 0),
        default_sampling_params_json=json.dumps(changed) if changed else "",
    )


def load_message(gauges: EngineGauges, settings: TargetSettings) -> pb.SchedulerLoad:
    """Returns the message about the engine's load."""
    return pb.SchedulerLoad(
        num_running_reqs=gauges.num_running,
        num_waiting_reqs=gauges.num_waiting,
        num_total_reqs=gauges.num_running + gauges.num_waiting,
        num_used_tokens=gauges.num_held_pages * settings.page_size,
        max_total_num_tokens=gauges.num_pages * settings.page_size,
        token_usage=gauges.num_held_pages / gauges.num_pages,
        utilization=gauges.num_running / settings.max_running_requests,
        max_running_requests=settings.max_running_requests,
    )
