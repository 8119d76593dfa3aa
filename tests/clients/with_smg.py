"""The gateway `smg` in front of the target, and the `openai` package in front of that.

What smg answers must be what Outrider's own gateway answers, which stands before the same target.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import openai
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

TARGET = os.environ["OUTRIDER_TARGET"]
START_TIMEOUT_S = 60.0
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_completion_tokens": 24,
    "temperature": 0.0,
}
SAMPLED = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_completion_tokens": 24,
    "temperature": 1.0,
    "seed": 7,
}
SCHEMA = {
    "type": "object",
    "properties": {"year": {"type": "integer"}},
    "required": ["year"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "remember", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def smg() -> Iterator[str]:
    """Starts smg; yields its URL."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "smg"), "launch", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--prometheus-host", "127.0.0.1"]
    command += ["--worker-urls", f"grpc://{TARGET}", "--log-level", "warn"]
    with Path("smg.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}/v1"
        except BaseException:
            log.seek(0)
            print(log.read())
            raise
        finally:
            process.terminate()
            process.wait(timeout=60)


def wait_for_model(client: openai.OpenAI) -> None:
    """Waits until smg has asked the target for what it needs."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(openai.APIError):
            client.chat.completions.create(**CHAT)
            return
        time.sleep(0.2)
    raise TimeoutError(f"smg serves nothing after {START_TIMEOUT_S:g} s")


def texts(client: openai.OpenAI, request: dict[str, object]) -> list[str]:
    """Returns the text of each choice, which streamed must be that of the whole answer."""
    whole = client.chat.completions.create(**request)
    found = [choice.message.content for choice in whole.choices]
    streamed = [""] * len(found)
    finish_reasons = [None] * len(found)
    for chunk in client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            finish_reasons[choice.index] = choice.finish_reason
    assert streamed == found
    assert finish_reasons == [choice.finish_reason for choice in whole.choices]
    return found


def main() -> None:
    own = openai.OpenAI(base_url=os.environ["OUTRIDER_URL"] + "/v1", api_key="none")
    with smg() as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        wait_for_model(client)
        assert [model.id for model in client.models.list()] == ["demo"]
        requests = [CHAT, SAMPLED, {**SAMPLED, "n": 3}, {**CHAT, "response_format": FORMAT}]
        requests += [{**CHAT, "stop": ["is P"]}, {**CHAT, "stop": [" Paris", "nothing"]}]
        for request in requests:
            assert texts(client, request) == texts(own, request), request

        answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
        expected = own.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
        for token, other in zip(
            answer.choices[0].logprobs.content, expected.choices[0].logprobs.content, strict=False
        ):
            assert (token.token, len(token.top_logprobs)) == (other.token, 3)
            assert token.logprob == pytest.approx(other.logprob, abs=1e-4)
        completion = client.completions.create(
            model="demo", prompt="The capital of", max_tokens=8, temperature=0
        )
        assert completion.choices[0].text

        choice = {"type": "function", "function": {"name": "remember"}}
        long = {**CHAT, "max_completion_tokens": 400}  # white space is free, and the model likes it
        forced = client.chat.completions.create(**long, tools=[TOOL], tool_choice=choice)
        [call] = forced.choices[0].message.tool_calls
        assert call.function.name == "remember"
        assert isinstance(json.loads(call.function.arguments)["year"], int)

        with pytest.raises(openai.BadRequestError, match="regular expression is wrong"):
            client.chat.completions.create(**CHAT, extra_body={"regex": "(a"})
        hang_up(client)
        details = answer.usage.completion_tokens_details
        print(f"{details.accepted_prediction_tokens} draft tokens in one of the answers")


def hang_up(client: openai.OpenAI) -> None:
    """Leaves in the middle of an answer; the target must not go on with it."""
    long = {**SAMPLED, "max_completion_tokens": 1500, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(**long, stream=True)
    next(iter(stream))
    stream.close()
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(TARGET) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        while stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest()).active_requests:
            assert time.monotonic() < deadline_s, "the target goes on without a reader"
            time.sleep(0.1)


if __name__ == "__main__":
    main()
