"""The published stubs of the VllmEngine contract, against the target itself."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

PARAMS = {"temperature": 0.0, "max_tokens": 16, "logprobs": 2, "prompt_logprobs": 1}


def request(stream: bool, **params: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=f"stubs-{stream}",
        text="The capital of France is",
        sampling_params=pb.SamplingParams(**{**PARAMS, **params}),
        stream=stream,
    )


def main() -> None:
    with grpc.insecure_channel(os.environ["OUTRIDER_TARGET"]) as channel:
        stub = pb_grpc.VllmEngineStub(channel)
        assert stub.HealthCheck(pb.HealthCheckRequest()).healthy
        model = stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.served_model_name, model.is_generation) == ("demo", True)
        [load] = stub.GetLoads(pb.GetLoadsRequest()).loads
        assert load.max_total_num_tokens > 0

        [whole] = [response.complete for response in stub.Generate(request(stream=False))]
        *chunks, last = list(stub.Generate(request(stream=True)))
        tokens = [token for response in chunks for token in response.chunk.token_ids]
        assert tokens == list(whole.output_ids) == list(last.complete.output_ids)
        probabilities = [
            value for each in chunks for value in each.chunk.output_logprobs.token_logprobs
        ]
        assert probabilities == pytest.approx(list(whole.output_logprobs.token_logprobs), abs=1e-4)
        assert len(whole.input_logprobs.token_ids) == whole.prompt_tokens
        assert not whole.input_logprobs.token_logprobs[0].HasField("value")

        parts = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
        data = b"".join(part.data for part in parts)
        assert parts[-1].sha256 == hashlib.sha256(data).hexdigest()
        assert "tokenizer.json" in zipfile.ZipFile(io.BytesIO(data)).namelist()

        stub.Abort(pb.AbortRequest(request_ids=["nobody"]))
        assert stub.FlushCache(common_pb2.FlushCacheRequest()).success
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(request(stream=False, temperature=9.0)))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as missing:
            stub.Embed(pb.EmbedRequest(request_id="e"))
        assert missing.value.code() is grpc.StatusCode.UNIMPLEMENTED
    print(f"{whole.spec_accepted_tokens} draft tokens of {len(tokens)}")


if __name__ == "__main__":
    main()
