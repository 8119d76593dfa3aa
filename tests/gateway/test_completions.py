"""`/v1/completions`: prompts in every form, echo, log probabilities."""

from __future__ import annotations

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types import Completion

from gateway.app import Gateway
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.text import Tokenizer
from tests.gateway.driving import events, eventually, ids_of, say
from tests.helpers.fake_target import FakeTarget, Reply, Steps


async def test_the_default_is_sixteen_tokens_of_one_choice(
    openai_client: AsyncOpenAI, target: FakeTarget
) -> None:
    answer = await openai_client.completions.create(model="fake", prompt="the other")
    assert [choice.finish_reason for choice in answer.choices] == ["length"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_strings_and_token_ids_are_prompts_alike(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer, num_prompts: int
) -> None:
    texts = [f"the {number}" for number in range(num_prompts)]
    token_ids = [await ids_of(tokenizer, text) for text in texts]
    for prompt in (texts, token_ids):
        answer = await openai_client.completions.create(model="fake", prompt=prompt, n=2)
        assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
        arrived = [list(submit.request.prompt_token_ids) for submit in target.submits]
        # Choice index is prompt · n + i.
        assert arrived == [each for each in token_ids for _ in range(2)]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, token_ids))
        target.submits.clear()


async def test_one_list_of_token_ids_is_one_prompt(
    openai_client: AsyncOpenAI, target: FakeTarget
) -> None:
    answer = await openai_client.completions.create(model="fake", prompt=[7, 8, 9], max_tokens=4)
    assert len(answer.choices) == 1
    assert list(target.submits[0].request.prompt_token_ids) == [7, 8, 9]


async def test_choices_of_different_prompts_are_told_apart_in_a_stream(
    openai_client: AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    prompts = ["there", "the lazy dog"]
    stream = await openai_client.completions.create(
        model="fake", prompt=prompts, n=2, max_tokens=12, stream=True
    )
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    async for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if choice.finish_reason:
            assert choice.index not in reasons
            reasons[choice.index] = choice.finish_reason
    assert reasons == dict.fromkeys(range(4), "length")
    for index, text in texts.items():
        prompt_ids = await ids_of(tokenizer, prompts[index // 2])
        assert text == tokenizer.decode((prompt_ids * 12)[:12])


@pytest.mark.parametrize("prompt", ["the é", [260, 5, 6]])
async def test_echo_puts_the_prompt_before_the_output(
    client: httpx.AsyncClient,
    target: FakeTarget,
    tokenizer: Tokenizer,
    prompt: str | list[int],
) -> None:
    await say(target, tokenizer, " fox")
    body = {"model": "fake", "prompt": prompt, "echo": True}
    echoed = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    whole = Completion.model_validate((await client.post("/v1/completions", json=body)).json())
    assert whole.choices[0].text == f"{echoed} fox"
    streamed = await client.post("/v1/completions", json={**body, "stream": True})
    *chunks, done = events(streamed.content)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"{echoed} fox"


async def test_logprobs_have_tokens_offsets_and_the_drawn_token_among_the_top(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    output = await say(target, tokenizer, "a é fox")
    answer = await openai_client.completions.create(model="fake", prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(output)
    assert logprobs.token_logprobs == pytest.approx([-0.5] * len(output))
    assert logprobs.tokens[0] == "a"
    # Half a character is spelled out in bytes and begins where its character does.
    half = logprobs.tokens.index("bytes:\\xc3")
    assert logprobs.tokens[half + 1] == "bytes:\\xa9"
    assert logprobs.text_offset[half] == logprobs.text_offset[half + 1] == 2
    for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert token in top


async def test_zero_logprobs_are_those_of_the_drawn_tokens(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "a")
    answer = await openai_client.completions.create(model="fake", prompt="x", logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert [list(top) for top in logprobs.top_logprobs] == [
        [token] for token in logprobs.tokens or ()
    ]


async def test_an_improbable_token_has_openais_least_logprob(
    client: httpx.AsyncClient, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(token_id: int, num_top: int, named: object) -> pb.TokenLogprobs:
        return pb.TokenLogprobs(log_prob=float("-inf"), rank=9)

    monkeypatch.setattr("tests.helpers.fake_target._logprobs", impossible)
    body = {"model": "fake", "prompt": "x", "logprobs": 0, "max_tokens": 1}
    response = await client.post("/v1/completions", json=body)
    assert response.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


async def test_a_default_length_is_cut_to_what_the_context_leaves(
    openai_client: AsyncOpenAI, target: FakeTarget, gateway: Gateway
) -> None:
    target.max_context_tokens = 10
    await target.break_sessions()
    await eventually(lambda: gateway.pool.links[0].epoch == 2)
    answer = await openai_client.completions.create(model="fake", prompt=[5] * 4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.choices[0].finish_reason == "length"


async def test_the_answer_names_its_token_ids(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "prompt": [5, 6], "max_tokens": 4, "return_token_ids": True}
    choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [5, 6, 5, 6])
    streamed = await client.post("/v1/completions", json={**body, "stream": True})
    first, *chunks, _ = (
        each["choices"][0] for each in [*events(streamed.content)[:-1], {"choices": [{}]}]
    )
    assert first["prompt_token_ids"] == [5, 6]
    assert [i for chunk in chunks for i in chunk["token_ids"]] == [5, 6, 5, 6]


async def test_special_tokens_are_text_only_when_asked_for(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    (letter,) = await ids_of(tokenizer, "a")
    target.reply = _always([[letter, 2, letter]])
    for skip, text in ((True, "aa"), (False, "a<|user|>a")):
        answer = await openai_client.completions.create(
            model="fake", prompt="x", max_tokens=3, extra_body={"skip_special_tokens": skip}
        )
        assert answer.choices[0].text == text


async def test_ids_beyond_the_tokenizer_have_no_text(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    (letter,) = await ids_of(tokenizer, "a")
    target.reply = _always([[letter, 511, letter]])
    answer = await openai_client.completions.create(model="fake", prompt="x", max_tokens=3)
    assert answer.choices[0].text == "aa"


def _always(steps: Steps) -> Reply:
    return lambda request: steps
