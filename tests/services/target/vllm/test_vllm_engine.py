"""The VllmEngine contract over real servers: the tokens of `TargetService`, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import io
import threading
import zipfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.embedded import build_embedded_draft
from services.embedded_settings import embedded_settings
from services.target.drafts.draft_policy import ALWAYS
from services.target.engine_factory import build_engine
from services.target.process import TargetProcess
from services.target.settings import TargetSettings
from services.target.step_report import StepReport
from shared.errors import OutriderError
from shared.pb.outrider.admin.v1 import admin_service_pb2 as admin_pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as admin_grpc
from shared.pb.outrider.target.v1 import target_service_pb2 as target_pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as target_grpc
from shared.pb.outrider.types.v1 import grammar_pb2, sampling_pb2
from shared.pb.smg.grpc.common import common_pb2
from shared.pb.vllm.grpc.engine import vllm_engine_pb2 as pb
from shared.pb.vllm.grpc.engine import vllm_engine_pb2_grpc as pb_grpc
from shared.rpc.channel import open_channel
from shared.rpc.status import error_from_rpc
from shared.sampling_defaults import choice_seed
from tests.helpers.checkpoints import EOS_TOKEN_ID, write_checkpoint

PROMPT = list(b"abcabcabc")
VOCAB = 258
LETTERS = dict.fromkeys(b"abcd", 50.0)
"""A bias under which every output is text, and repeats itself."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), seed=3, with_tokenizer=True)


class Gate:
    """Holds the engine's thread a few steps after it was told to."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._num_left = 0
        self.open()

    def open(self) -> None:
        """Lets the engine run."""
        self._is_open.set()

    def close(self) -> None:
        """Stops the engine after three more steps that bring tokens: the first may be one of an
        earlier request, whose tokens are there before the step is over."""
        self._num_left = 3
        self._is_open.clear()

    def pass_through(self, report: StepReport) -> None:
        """Called on the engine's thread after each step, when its tokens are on their way."""
        self._num_left -= report.num_committed > 0
        if self._num_left <= 0:
            self._is_open.wait()


@dataclass(frozen=True)
class Served:
    """A target and its clients."""

    process: TargetProcess
    channel: aio.Channel
    admin: aio.Channel
    gate: Gate

    @property
    def stub(self) -> pb_grpc.VllmEngineStub:
        return pb_grpc.VllmEngineStub(self.channel)

    async def held_pages(self) -> float:
        stub = admin_grpc.AdminServiceStub(self.admin)
        info = await stub.GetServerInfo(admin_pb.GetServerInfoRequest())
        return info.gauges["held_page_count"]

    async def wait_idle(self) -> None:
        """Waits for what the engine's thread is about to do."""
        async with asyncio.timeout(30.0):
            while await self.held_pages():
                await asyncio.sleep(0)


@asynccontextmanager
async def _serve(
    folder: Path, *, has_draft: bool = False, **changes: object
) -> AsyncIterator[Served]:
    """Runs a target, with an embedded n-gram draft or without any."""
    settings = TargetSettings(
        model_path=folder,
        port=0,
        max_total_tokens=1024,
        context_length=64,
        device="cpu",
        grpc_vllm_engine=True,
        disable_radix_cache=True,
        # With a draft, always wants trees, and waits for them.
        candidate_wait_ms=10_000.0,
        candidate_wait_sequences=ALWAYS,
    )
    settings = replace(settings, **changes)  # type: ignore[arg-type]
    gate = Gate()
    engine = build_engine(settings, gate.pass_through)
    process = TargetProcess(engine, settings, "ab" * 32)
    if has_draft:
        draft = embedded_settings(settings, ["--speculative-algorithm", "NGRAM"], {})
        embedded = build_embedded_draft(engine, settings, draft)
        process.embed(embedded.port, embedded.settings)
    await process.start()
    async with (
        open_channel(f"127.0.0.1:{process.port}") as channel,
        open_channel(f"127.0.0.1:{process.admin_port}") as admin,
    ):
        try:
            yield Served(process, channel, admin, gate)
        finally:
            gate.open()
            await process.stop(grace_s=0.0)


def _request(
    params: pb.SamplingParams | None = None, prompt: Sequence[int] = PROMPT, **fields: object
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=params or _params(),
        **fields,  # type: ignore[arg-type]
    )


def _params(**fields: object) -> pb.SamplingParams:
    known: dict[str, object] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    return pb.SamplingParams(**(known | fields))  # type: ignore[arg-type]


async def _whole(served: Served, request: pb.GenerateRequest) -> list[pb.GenerateComplete]:
    return [response.complete async for response in served.stub.Generate(request)]


async def _one(served: Served, params: pb.SamplingParams) -> pb.GenerateComplete:
    [complete] = await _whole(served, _request(params))
    return complete


async def _own(
    served: Served,
    sampling: sampling_pb2.SamplingParams,
    stop: sampling_pb2.StopParams | None = None,
    **fields: object,
) -> list[target_pb.GenerateResponse]:
    """Returns what `TargetService` answers to the same prompt."""
    request = target_pb.GenerateRequest(
        prompt_token_ids=PROMPT,
        sampling_params=sampling,
        stop_params=stop or sampling_pb2.StopParams(max_output_token_count=20, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )
    stub = target_grpc.TargetServiceStub(served.channel)
    return [response async for response in stub.Generate(request)]


async def _own_tokens(
    served: Served,
    sampling: sampling_pb2.SamplingParams,
    stop: sampling_pb2.StopParams | None = None,
    **fields: object,
) -> list[int]:
    responses = await _own(served, sampling, stop, **fields)
    return [token for response in responses for token in response.delta.token_ids]


GREEDY = sampling_pb2.SamplingParams(temperature=0.0)
SHAPED: dict[str, object] = {
    "temperature": 0.9,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.01,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": {7: 2.0},
    "seed": 11,
}


@pytest.mark.parametrize("has_draft", [False, True])
async def test_tokens_are_those_of_target_service(folder: Path, has_draft: bool) -> None:
    """With and without drafted trees; greedy, seeded, and with everything that shapes logits."""
    cases: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logit_bias": LETTERS},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "seed": -5},
        SHAPED,
    ]
    async with _serve(folder, has_draft=has_draft) as served:
        for case in cases:
            complete = await _one(served, _params(**case))
            own = await _own_tokens(
                served,
                sampling_pb2.SamplingParams(**case),  # type: ignore[arg-type]
            )
            assert list(complete.output_ids) == own
            assert (complete.finish_reason, complete.completion_tokens) == ("length", 20)
            assert complete.prompt_tokens == len(PROMPT)


async def test_speculation_is_on_and_told(folder: Path) -> None:
    async with _serve(folder, has_draft=True) as served:
        params = _params(logit_bias=LETTERS)
        complete = await _one(served, params)
        own = await _own(served, sampling_pb2.SamplingParams(temperature=0.0, logit_bias=LETTERS))
        stats = own[-1].finished.speculation
        assert stats.accepted_token_count > 0
        # The draft learns from every answer, so the counts may differ.
        assert 0 < complete.spec_accepted_tokens <= complete.spec_draft_tokens


async def test_chunks_join_to_the_whole(folder: Path) -> None:
    async with _serve(folder, has_draft=True) as served:
        params = _params(logit_bias=LETTERS, logprobs=2, prompt_logprobs=1)
        [whole] = await _whole(served, _request(params))
        responses = [
            response async for response in served.stub.Generate(_request(params, stream=True))
        ]
    *chunks, last = (getattr(each, each.WhichOneof("response")) for each in responses)
    assert [token for chunk in chunks for token in chunk.token_ids] == list(whole.output_ids)
    assert sum(chunk.completion_tokens for chunk in chunks) == whole.completion_tokens == 20
    assert len(chunks) < 20, "no step brought more than one token"
    assert {chunk.prompt_tokens for chunk in chunks} == {len(PROMPT)}
    joined = pb.OutputLogProbs()
    for chunk in chunks:
        joined.MergeFrom(chunk.output_logprobs)
    assert joined == whole.output_logprobs
    assert chunks[0].input_logprobs == whole.input_logprobs
    assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])
    assert 0 < last.spec_accepted_tokens <= 20 - len(chunks)
    for complete in (whole, last):
        complete.ClearField("output_logprobs")
        complete.ClearField("input_logprobs")
        complete.ClearField("spec_accepted_tokens")
        complete.ClearField("spec_draft_tokens")
    assert last == whole


async def test_log_probabilities_are_those_of_target_service(folder: Path) -> None:
    async with _serve(folder) as served:
        complete = await _one(served, _params(logprobs=2, prompt_logprobs=3))
        own = await _own(
            served,
            GREEDY,
            top_logprob_count=2,
            prompt_logprob_params=target_pb.PromptLogprobParams(top_logprob_count=3),
        )
        bare = await _one(served, _params(logprobs=0, prompt_logprobs=0))
        none = await _one(served, _params())
    drawn = [each for response in own for each in response.delta.logprobs]
    scored = [each for response in own for each in response.prompt_logprobs.logprobs]
    output, prompt = complete.output_logprobs, complete.input_logprobs
    assert list(output.token_ids) == list(complete.output_ids)
    assert list(output.token_logprobs) == [each.log_prob for each in drawn]
    assert [list(top.token_ids) for top in output.top_logprobs] == [
        list(each.top_token_ids) for each in drawn
    ]
    assert list(prompt.token_ids) == PROMPT
    assert not prompt.token_logprobs[0].HasField("value")
    assert [each.value for each in prompt.token_logprobs[1:]] == [s.log_prob for s in scored]
    assert [list(top.values) for top in prompt.top_logprobs] == [
        [],
        *(list(each.top_log_probs) for each in scored),
    ]
    assert list(bare.output_logprobs.token_logprobs) == list(output.token_logprobs)
    assert not bare.output_logprobs.top_logprobs
    assert not bare.input_logprobs.top_logprobs
    assert not none.HasField("output_logprobs")
    assert not none.HasField("input_logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_have_seeds_of_their_own(folder: Path, stream: bool) -> None:
    async with _serve(folder) as served:
        request = _request(_params(temperature=1.0, seed=9, n=3), stream=stream)
        completes = [
            response.complete
            async for response in served.stub.Generate(request)
            if response.HasField("complete")
        ]
        found = {complete.index: list(complete.output_ids) for complete in completes}
        for index in range(3):
            sampling = sampling_pb2.SamplingParams(temperature=1.0, seed=choice_seed(9, index))
            assert found[index] == await _own_tokens(served, sampling)
        assert len({tuple(tokens) for tokens in found.values()}) == 3
        if not stream:
            assert [complete.index for complete in completes] == [0, 1, 2]


async def test_stop_strings_end_where_the_text_ends_with_and_without_trees(folder: Path) -> None:
    found = []
    for has_draft in (False, True):
        async with _serve(folder, has_draft=has_draft) as served:
            plain = await _one(served, _params(logit_bias=LETTERS))
            text = bytes(plain.output_ids).decode()
            string = text[5:8]
            end = text.index(string) + len(string)
            stopped = await _one(served, _params(logit_bias=LETTERS, stop=["zz", string]))
            assert bytes(stopped.output_ids).decode() == text[:end]
            assert (stopped.finish_reason, stopped.matched_stop_str) == ("stop", string)
            assert stopped.completion_tokens == end
            late = await _one(served, _params(logit_bias=LETTERS, stop=[text[0]], min_tokens=4))
            assert late.completion_tokens == text.index(text[0], 4) + 1
            await served.wait_idle()
            found.append((text, list(stopped.output_ids), list(late.output_ids)))
    assert found[0] == found[1]


async def test_end_tokens_end_and_only_named_ones_are_told(folder: Path) -> None:
    async with _serve(folder) as served:
        plain = list((await _one(served, _params())).output_ids)
        token = plain[3]
        end = plain.index(token) + 1
        stopped = await _one(served, _params(stop_token_ids=[token]))
        assert list(stopped.output_ids) == plain[:end]
        assert (stopped.finish_reason, stopped.matched_token_id) == ("stop", token)
        bias = {EOS_TOKEN_ID: 100.0}
        ended = await _one(served, _params(logit_bias=bias, ignore_eos=False, min_tokens=3))
        assert list(ended.output_ids)[3:] == [EOS_TOKEN_ID]
        assert (ended.finish_reason, ended.WhichOneof("matched_stop")) == ("stop", None)


async def test_text_is_tokenized_and_prompts_are_cut_from_the_left(folder: Path) -> None:
    async with _serve(folder) as served:
        expected = (await _one(served, _params())).output_ids
        text = pb.GenerateRequest(text=bytes(PROMPT).decode(), sampling_params=_params())
        [complete] = await _whole(served, text)
        assert (complete.output_ids, complete.prompt_tokens) == (expected, len(PROMPT))
        cut = _params(truncate_prompt_tokens=len(PROMPT))
        [complete] = await _whole(served, _request(cut, [1, 2, 3, *PROMPT]))
        assert (complete.output_ids, complete.prompt_tokens) == (expected, len(PROMPT))
        all_it_takes = _params(truncate_prompt_tokens=-1)
        [complete] = await _whole(served, _request(all_it_takes, [1] * 100))
        assert (complete.prompt_tokens, complete.completion_tokens) == (63, 1)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[ab]{3}c"}, grammar_pb2.Grammar(regex="[ab]{3}c")),
        ({"grammar": 'root ::= "x" "y"*'}, grammar_pb2.Grammar(ebnf='root ::= "x" "y"*')),
        ({"json_schema": '{"enum": [17]}'}, grammar_pb2.Grammar(json_schema='{"enum": [17]}')),
        (
            {"choice": pb.ChoiceConstraint(choices=["left", "right"])},
            grammar_pb2.Grammar(choices=grammar_pb2.TextChoices(texts=["left", "right"])),
        ),
        ({"json_object": True}, grammar_pb2.Grammar(json_schema='{"type": "object"}')),
        (
            {"structural_tag": '{"format": {"type": "const_string", "value": "ok"}}'},
            grammar_pb2.Grammar(
                structural_tag='{"format": {"type": "const_string", "value": "ok"}}'
            ),
        ),
        ({"json_object": False}, None),
    ],
)
async def test_constraints_are_those_of_target_service(
    folder: Path, constraint: dict[str, object], pattern: grammar_pb2.Grammar | None
) -> None:
    async with _serve(folder) as served:
        complete = await _one(served, _params(ignore_eos=False, **constraint))
        fields = {} if pattern is None else {"grammar": pattern}
        stop = sampling_pb2.StopParams(max_output_token_count=20)
        assert list(complete.output_ids) == await _own_tokens(served, GREEDY, stop, **fields)


async def test_what_a_gateway_sets_without_an_effect_has_none(folder: Path) -> None:
    async with _serve(folder) as served:
        plain = await _one(served, _params())
        params = _params(
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
            include_stop_str_in_output=True,
            grammar_from_first_token=True,
            top_k=2**32 - 1,
            top_p=1.0,
            repetition_penalty=1.0,
            n=1,
        )
        [complete] = await _whole(served, _request(params, data_parallel_rank=0))
        assert complete == plain


BAD: list[tuple[pb.GenerateRequest, str, str, str]] = [
    (pb.GenerateRequest(), "PROMPT_EMPTY", "prompt", "at least 1"),
    (_request(prompt=[1] * 64), "PROMPT_TOO_LONG", "prompt", "it may have 63"),
    (_request(prompt=[VOCAB]), "TOKEN_OUT_OF_RANGE", "prompt_token_ids", f"token {VOCAB}"),
    *(
        (
            _request(_params(**{name: value})),
            "SAMPLING_PARAM_OUT_OF_RANGE",
            name,
            f"{name} is {value}; it must be",
        )
        for name, value in (
            ("temperature", 2.5),
            ("temperature", float("nan")),
            ("top_p", 1.5),
            ("min_p", -0.5),
            ("frequency_penalty", 3.0),
            ("presence_penalty", -3.0),
            ("repetition_penalty", 2.5),
            ("max_tokens", 0),
            ("min_tokens", 21),
            ("n", 129),
            ("logprobs", -1),
            ("logprobs", 21),
            ("prompt_logprobs", -1),
            ("prompt_logprobs", 21),
            ("truncate_prompt_tokens", 0),
            ("truncate_prompt_tokens", -2),
        )
    ),
    (
        _request(_params(stop_token_ids=[VOCAB])),
        "SAMPLING_PARAM_OUT_OF_RANGE",
        "stop_token_ids",
        f"stop_token_ids holds token {VOCAB}; ids must be in [0, {VOCAB})",
    ),
    (
        _request(_params(logit_bias={-1: 1.0})),
        "SAMPLING_PARAM_OUT_OF_RANGE",
        "logit_bias",
        "logit_bias holds token -1; ids must be in",
    ),
    (_request(_params(stop=["x"] * 17)), "STOP_OUT_OF_RANGE", "stop", "at most 16"),
    (_request(_params(stop=[""])), "STOP_OUT_OF_RANGE", "stop", "0 characters"),
    (_request(_params(stop=["x" * 1025])), "STOP_OUT_OF_RANGE", "stop", "1025 characters"),
    (_request(_params(regex="(")), "GRAMMAR_INVALID", "grammar", "regular expression"),
    *(
        (_request(**{name: value}), "FIELD_UNSUPPORTED", name, f"{name} is set: this target")
        for name, value in (
            ("kv_transfer_params", pb.KvTransferParams()),
            ("kv_transfer_params_json", "{}"),
            ("mm_inputs", pb.MultimodalInputs()),
            ("extra_mm_inputs", [pb.MultimodalInputs()]),
            ("media_refs", pb.MediaRefs()),
        )
    ),
    (
        _request(data_parallel_rank=1),
        "SAMPLING_PARAM_OUT_OF_RANGE",
        "data_parallel_rank",
        "data_parallel_rank is 1; it must be 0",
    ),
]


async def test_bad_requests_get_their_named_errors(folder: Path) -> None:
    async with _serve(folder) as served:
        for request, reason, name, text in BAD:
            with pytest.raises(aio.AioRpcError) as failure:
                await _whole(served, request)
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            error = error_from_rpc(failure.value)
            assert (error.reason, error.violations[0].field) == (reason, name)
            assert text in error.message
        assert await served.held_pages() == 0


async def test_text_without_a_tokenizer_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    async with _serve(folder, tokenizer_path=tmp_path) as served:
        text = pb.GenerateRequest(text="abc", sampling_params=_params())
        for request, name in ((text, "text"), (_request(_params(stop=["x"])), "stop")):
            with pytest.raises(aio.AioRpcError) as failure:
                await _whole(served, request)
            error = error_from_rpc(failure.value)
            assert (error.reason, error.violations[0].field) == ("TOKENIZER_MISSING", name)
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await _one(served, _params())).completion_tokens == 20


async def test_abort_ends_a_stream_with_what_it_has(folder: Path) -> None:
    async with _serve(folder) as served:
        whole = await _one(served, _params(max_tokens=55))
        request = _request(_params(max_tokens=55), stream=True, request_id="r-1")
        served.gate.close()  # the engine stops after a step, so it cannot come to the end
        call = aiter(served.stub.Generate(request))
        first = await anext(call)
        await served.stub.Abort(pb.AbortRequest(request_ids=["unknown", "r-1"]))
        responses = [first, *[response async for response in call]]
        served.gate.open()
        tokens = [token for each in responses for token in each.chunk.token_ids]
        last = responses[-1].complete
        assert last.finish_reason == "abort"
        assert list(last.output_ids) == tokens == list(whole.output_ids)[: len(tokens)]
        assert 0 < len(tokens) < 55
        await served.wait_idle()
        again = await _whole(served, _request(request_id="r-1"))
        assert again[0].finish_reason == "length"


async def test_hanging_up_frees_pages(folder: Path) -> None:
    async with _serve(folder) as served:
        served.gate.close()
        call = served.stub.Generate(_request(_params(max_tokens=55, n=3), stream=True))
        await call.read()
        call.cancel()
        served.gate.open()
        await served.wait_idle()


async def test_an_id_that_is_open_is_refused(folder: Path) -> None:
    async with _serve(folder) as served:
        served.gate.close()
        call = aiter(served.stub.Generate(_request(stream=True, request_id="r-1")))
        first = await anext(call)
        with pytest.raises(aio.AioRpcError) as failure:
            await _whole(served, _request(request_id="r-1"))
        served.gate.open()
        assert error_from_rpc(failure.value).reason == "REQUEST_ID_DUPLICATE"
        rest = [response async for response in call]
        assert first.HasField("chunk")
        assert rest[-1].complete.finish_reason == "length"


async def test_requests_without_an_id_may_share_that_of_their_call(folder: Path) -> None:
    """`x-request-id` names the client's request, of which there may be several calls."""
    metadata = aio.Metadata(("x-request-id", "r-1"))
    async with _serve(folder) as served:
        served.gate.close()
        calls = [served.stub.Generate(_request(), metadata=metadata) for _ in range(2)]
        async with asyncio.timeout(30.0):
            request = pb.GetServerInfoRequest()
            while (await served.stub.GetServerInfo(request)).active_requests < 2:
                await asyncio.sleep(0)
        served.gate.open()
        for call in calls:
            assert [response async for response in call][-1].complete.finish_reason == "length"


async def test_model_server_and_loads_are_told(folder: Path) -> None:
    async with _serve(folder, served_model_name="tiny", max_running_requests=4) as served:
        stub = served.stub
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.model_path, model.served_model_name) == ("tiny", "tiny")
        assert (model.max_context_length, model.max_req_input_len) == (64, 63)
        assert (model.vocab_size, model.is_generation) == (VOCAB, True)
        assert (model.model_type, list(model.architectures)) == ("llama", ["LlamaForCausalLM"])
        assert list(model.eos_token_ids) == [EOS_TOKEN_ID]
        assert model.default_sampling_params_json == ""

        served.gate.close()
        call = stub.Generate(_request(_params(max_tokens=50, n=2), stream=True))
        await call.read()
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.active_requests, server.is_paused) == (1, False)
        assert (server.server_type, server.data_parallel_size) == ("vllm-grpc", 1)
        assert (server.max_num_seqs, server.block_size) == (4, 16)
        assert server.last_receive_timestamp > 0
        served.gate.open()
        call.cancel()
        await served.wait_idle()

        loads = await stub.GetLoads(pb.GetLoadsRequest())
        [load] = loads.loads
        assert (load.num_total_reqs, load.token_usage) == (0, 0.0)
        assert (load.max_total_num_tokens, load.max_running_requests) == (1024, 4)
        assert not (await stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads


async def test_loads_tell_how_much_the_prefix_cache_finds(folder: Path) -> None:
    async with _serve(folder, disable_radix_cache=False) as served:
        for _ in range(2):
            await _whole(served, _request(prompt=[1] * 32))
        [load] = (await served.stub.GetLoads(pb.GetLoadsRequest())).loads
        assert load.cache_hit_rate == 16 / 64


async def test_sampling_defaults_of_the_model_are_told(folder: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, seed=3, with_tokenizer=True)
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 1.0}')
    async with _serve(model) as served:
        told = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert told.default_sampling_params_json == '{"temperature": 0.6}'


async def test_the_tokenizer_comes_as_an_archive(folder: Path) -> None:
    async with _serve(folder) as served:
        request = common_pb2.GetTokenizerRequest()
        chunks = [chunk async for chunk in served.stub.GetTokenizer(request)]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert not any(chunk.sha256 for chunk in chunks[:-1])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json") == (folder / "tokenizer.json").read_bytes()
        assert not [name for name in archive.namelist() if name.endswith(".safetensors")]


async def test_flush_frees_cached_pages(folder: Path) -> None:
    async with _serve(folder, disable_radix_cache=False) as served:
        await _one(served, _params(max_tokens=40))
        response = await served.stub.FlushCache(common_pb2.FlushCacheRequest())
        assert (response.success, response.message) == (True, "3 pages were freed")
        with pytest.raises(aio.AioRpcError) as failure:
            await served.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=-1.0))
        assert error_from_rpc(failure.value).reason == "TIMEOUT_OUT_OF_RANGE"


async def test_what_a_target_does_not_have_is_unimplemented_by_name(folder: Path) -> None:
    async with _serve(folder) as served:
        stub = served.stub
        calls = {
            "Embed": stub.Embed(pb.EmbedRequest()),
            "StartProfile": stub.StartProfile(common_pb2.StartProfileRequest()),
            "StopProfile": stub.StopProfile(common_pb2.StopProfileRequest()),
            "SubscribeKvEvents": stub.SubscribeKvEvents(
                common_pb2.SubscribeKvEventsRequest()
            ).read(),
        }
        for name, call in calls.items():
            with pytest.raises(aio.AioRpcError) as failure:
                await call
            assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert (failure.value.details() or "").startswith(f"{name} is not implemented")


async def test_health_follows_the_process(folder: Path) -> None:
    async with _serve(folder) as served:
        health = health_pb2_grpc.HealthStub(served.channel)
        named = health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine")
        assert (await health.Check(named)).status == health_pb2.HealthCheckResponse.SERVING
        assert (await served.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        drained = admin_pb.DrainServerRequest()
        await admin_grpc.AdminServiceStub(served.admin).DrainServer(drained)
        assert (await health.Check(named)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        answer = await served.stub.HealthCheck(pb.HealthCheckRequest())
        assert (answer.healthy, answer.message) == (False, "draining")
        with pytest.raises(aio.AioRpcError) as failure:
            await _one(served, _params())
        error: OutriderError = error_from_rpc(failure.value)
        assert error.reason == "SERVER_DRAINING"


async def test_a_drain_waits_for_requests_of_this_contract(folder: Path) -> None:
    async with _serve(folder) as served:
        served.gate.close()
        call = aiter(served.stub.Generate(_request(stream=True)))
        await anext(call)
        admin = admin_grpc.AdminServiceStub(served.admin)
        request = admin_pb.DrainServerRequest()
        request.grace_duration.FromNanoseconds(0)
        assert (await admin.DrainServer(request)).running_request_count == 1
        served.gate.open()
        responses = [response async for response in call]
        assert responses[-1].complete.finish_reason == "length"


async def test_without_the_flag_nothing_is_served(folder: Path) -> None:
    async with _serve(folder, grpc_vllm_engine=False) as served:
        with pytest.raises(aio.AioRpcError) as failure:
            await _one(served, _params())
        assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
        health = health_pb2_grpc.HealthStub(served.channel)
        request = health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine")
        with pytest.raises(aio.AioRpcError) as failure:
            await health.Check(request)
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND
