"""Starts the outputs that a `Generate` call of the VllmEngine contract asks for."""

from __future__ import annotations

import logging
from pathlib import Path

from services.target.requests.admission import Admission
from services.target.requests.request import GenerationRequest
from services.target.vllm import vllm_engine_codec as codec
from services.target.vllm.once import Once
from services.target.vllm.open_choices import OpenChoices
from services.target.vllm.text_stop import TextStop
from shared.errors import CheckpointError, InvalidArgument
from shared.pb.vllm.grpc.engine import vllm_engine_pb2 as pb
from shared.telemetry.request_id import current_traceparent
from shared.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class SubmissionService:
    """Reads the tokenizer when a call first brings text, or stops at some."""

    def __init__(self, admission: Admission, tokenizer_folder: Path) -> None:
        self._admission = admission
        self._engine = admission.engine
        self._tokenizer = Once(lambda: Tokenizer.read(tokenizer_folder))

    async def submit(self, message: pb.GenerateRequest, log_id: str, opened: OpenChoices) -> None:
        """Starts the outputs of a request.

        Raises:
            OutriderError: the request is refused.
        """
        self._admission.check_open()
        codec.check_supported(message)
        params = message.sampling_params
        prompt = codec.prompt_within(await self._prompt(message), params, self._engine.limits)
        parent = current_traceparent.get()
        opened.record(log_id, len(prompt), parent)
        template = await self._admission.with_grammar(
            self._template(log_id, prompt, params), codec.grammar_from_message(params)
        )
        requests = codec.choice_requests(template, params)
        stops = [await self._text_stop(params, each) for each in requests]
        for _ in requests[1:]:
            opened.record(log_id, len(prompt), parent)
        opened.submit(requests, stops)

    def _template(
        self, log_id: str, prompt: tuple[int, ...], params: pb.SamplingParams
    ) -> GenerationRequest:
        limits = self._engine.limits
        return GenerationRequest(
            request_id=log_id,
            prompt_token_ids=prompt,
            sampling=codec.sampling_from_message(params, limits),
            stop=codec.stop_from_message(params, limits.max_sequence_tokens - len(prompt)),
            arrival_s=self._admission.recorder.clock(),
            top_logprobs=codec.top_logprobs(params),
            prompt_scoring=codec.prompt_scoring(params),
        )

    async def _prompt(self, message: pb.GenerateRequest) -> list[int]:
        if message.WhichOneof("input") != "text":
            return list(message.tokenized.input_ids)
        return await (await self._read_tokenizer("text")).encode(
            message.text, add_special_tokens=True
        )

    async def _text_stop(
        self, params: pb.SamplingParams, request: GenerationRequest
    ) -> TextStop | None:
        strings = codec.stop_strings(params)
        if not strings:
            return None
        return TextStop(
            await self._read_tokenizer("stop"),
            strings,
            skip_special_tokens=params.skip_special_tokens,
            silent_token_ids=request.stop.stop_token_ids | self._end_token_ids(request),
            num_ignored=request.stop.min_output_tokens,
        )

    def _end_token_ids(self, request: GenerationRequest) -> frozenset[int]:
        return frozenset() if request.stop.ignore_eos else self._engine.limits.eos_token_ids

    async def _read_tokenizer(self, field: str) -> Tokenizer:
        """Raises:
        InvalidArgument: the target has no tokenizer; the field cannot be heeded.
        """
        try:
            return await self._tokenizer.get()
        except CheckpointError as error:
            logger.warning("no text: %s", error.message)
            message = f"{field} is set, but this target has no tokenizer that it can use"
            raise InvalidArgument.of("TOKENIZER_MISSING", field, message) from error
