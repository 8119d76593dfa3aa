"""`/generate`: SGLang's fields, cumulative streams, counters, aborts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from gateway.app import Gateway
from gateway.native.generate import GeneratedText
from shared.text import Tokenizer
from tests.gateway.driving import error_of, events, eventually, ids_of, say
from tests.helpers.fake_target import FakeTarget


async def generate(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_text_is_continued_and_counted(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    target.num_cached_tokens = 2
    answer = await generate(
        client, text="the fox", rid="mine", sampling_params={"max_new_tokens": 6}
    )
    prompt = await ids_of(tokenizer, "the fox")
    output = (prompt * 6)[:6]
    assert answer["text"] == tokenizer.decode(output)
    assert answer["output_ids"] == output
    info = answer["meta_info"]
    assert info["id"] == "mine"
    assert info["finish_reason"] == {"type": "length", "length": 6}
    assert info["prompt_tokens"] == len(prompt)
    assert (info["completion_tokens"], info["cached_tokens"]) == (6, 2)
    assert info["e2e_latency"] > 0
    assert "index" not in answer
    assert "output_token_logprobs" not in info


async def test_sampling_params_reach_the_target_by_their_own_names(
    client: httpx.AsyncClient, target: FakeTarget
) -> None:
    sampling = {
        "max_new_tokens": 3,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.25,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "sampling_seed": 11,
        "stop_token_ids": [9],
        "ignore_eos": True,
    }
    await generate(client, input_ids=[5, 6], sampling_params=sampling)
    request = target.submits[0].request
    assert list(request.prompt_token_ids) == [5, 6]
    drawn, stop = request.sampling_params, request.stop_params
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p) == (0.5, 0.75, 7, 0.25)
    assert (drawn.frequency_penalty, drawn.presence_penalty) == (0.5, -0.5)
    assert (drawn.repetition_penalty, drawn.seed) == (1.5, 11)
    assert (stop.max_output_token_count, stop.min_output_token_count) == (3, 2)
    assert (list(stop.stop_token_ids), stop.ignore_eos) == ([9], True)


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
async def test_caches_are_shared_by_a_key_and_text_is_predicted(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer, name: str
) -> None:
    body = {name: "mine", "prediction": {"content": "the fox"}, "priority": 2}
    sampling = {"allowed_token_ids": [3], "min_tokens": 1, "seed": 4, "max_new_tokens": 2}
    await generate(client, input_ids=[5, 6], sampling_params=sampling, **body)
    request = target.submits[0].request
    assert (request.cache_salt, request.priority) == ("mine", 2)
    assert list(request.predicted_token_ids) == await ids_of(tokenizer, "the fox")
    assert list(request.sampling_params.allowed_token_ids) == [3]
    assert (request.sampling_params.seed, request.stop_params.min_output_token_count) == (4, 1)


async def test_the_default_length_is_sglangs(client: httpx.AsyncClient, target: FakeTarget) -> None:
    await generate(client, input_ids=[5, 6])
    assert target.submits[0].request.stop_params.max_output_token_count == 128


async def test_counters_have_the_names_of_old_and_new_releases(client: httpx.AsyncClient) -> None:
    answer = await generate(client, input_ids=[5, 6], sampling_params={"max_new_tokens": 7})
    info = answer["meta_info"]
    # Rounds of 3, 3 and 1 tokens; each drafted two more than it accepted.
    expected = {
        "spec_verify_ct": 3,
        "spec_accept_token_num": 4,
        "spec_draft_token_num": 10,
        "spec_accept_histogram": [1, 0, 2],
        "spec_num_correct_drafts": 4,
        "spec_num_proposed_drafts": 10,
        "spec_accepted_drafts": 4,
        "spec_proposed_drafts": 10,
        "spec_correct_drafts_histogram": [1, 0, 2],
    }
    assert {name: info[name] for name in expected} == expected
    assert info["spec_accept_rate"] == pytest.approx(0.4)
    assert info["spec_accept_length"] == pytest.approx(7 / 3)


async def test_without_a_draft_there_are_no_counters(
    client: httpx.AsyncClient, target: FakeTarget
) -> None:
    answer = await generate(
        client,
        input_ids=[5],
        sampling_params={"max_new_tokens": 4},
        speculation={"disable": True},
    )
    assert not any(name.startswith("spec_") for name in answer["meta_info"])
    assert target.submits[0].request.speculation_params.disabled


@pytest.mark.parametrize(
    ("sampling", "shown"),
    [({"stop": ["fox"]}, "the "), ({"stop": "fox", "no_stop_trim": True}, "the fox")],
)
async def test_a_stop_string_is_named(
    client: httpx.AsyncClient,
    target: FakeTarget,
    tokenizer: Tokenizer,
    sampling: dict[str, Any],
    shown: str,
) -> None:
    await say(target, tokenizer, "the fox jumps")
    answer = await generate(client, text="x", sampling_params=sampling)
    assert answer["text"] == shown
    info = answer["meta_info"]
    assert info["finish_reason"] == {"type": "stop", "matched": "fox"}
    assert info["spec_verify_ct"] > 0


async def test_an_end_token_is_named(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    output = await say(target, tokenizer, "the fox")
    answer = await generate(client, text="x")
    assert (answer["text"], answer["output_ids"]) == ("the fox", output)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 0}


async def test_batches_and_choices_are_lists_in_order(
    client: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    sampling = {"max_new_tokens": 4, "n": 2}
    answers = await generate(client, text=["the", "dog"], rid="b", sampling_params=sampling)
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["meta_info"]["id"] for answer in answers] == ["b_0", "b_1", "b_2", "b_3"]
    prompts = [await ids_of(tokenizer, text) for text in ("the", "the", "dog", "dog")]
    assert [a["output_ids"] for a in answers] == [(prompt * 4)[:4] for prompt in prompts]
    one = await generate(client, text=["the"], sampling_params=[{"max_new_tokens": 1}])
    assert len(one) == 1


async def test_log_probabilities_are_triples(
    client: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    answer = await generate(
        client,
        text="the",
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
        logprob_start_len=-1,
    )
    info, output = answer["meta_info"], answer["output_ids"]
    assert info["output_token_logprobs"] == [
        [-0.5, token_id, tokenizer.decode([token_id])] for token_id in output
    ]
    assert [[each[:2] for each in top] for top in info["output_top_logprobs"]] == [
        [[-0.5, token_id], [-1.25, token_id + 1]] for token_id in output
    ]
    assert info["input_token_logprobs"] == []
    bare = await generate(client, input_ids=[5], return_logprob=True)
    assert bare["meta_info"]["output_token_logprobs"][0] == [-0.5, 5, None]
    assert "output_top_logprobs" not in bare["meta_info"]


async def test_a_stream_says_everything_so_far(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    output = await say(target, tokenizer, "the quick é fox")
    body = {"text": "x", "stream": True, "return_logprob": True}
    response = await client.post("/generate", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.content)
    assert done == "[DONE]"
    assert len(chunks) > 1
    for before, after in itertools.pairwise(chunks):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    last = chunks[-1]
    assert (last["text"], last["output_ids"]) == ("the quick é fox", output)
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": 0}
    assert [each[1] for each in last["meta_info"]["output_token_logprobs"]] == output
    assert last["meta_info"]["spec_verify_ct"] > 1


async def test_a_stream_encodes_the_scores_of_its_prompt_once(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by fuzzing: they are in every event, and 3,000 of them cost seconds."""
    num_scored: list[int] = []
    scored = GeneratedText._inputs

    def counted(text: GeneratedText, prompt: Sequence[int]) -> Any:
        found = scored(text, prompt)
        num_scored.append(len(found))
        return found

    monkeypatch.setattr(GeneratedText, "_inputs", counted)
    prompt = [5, 6, 7, 8]
    body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0, "stream": True}
    sampling = {"max_new_tokens": 30}
    answer = await client.post("/generate", json={**body, "sampling_params": sampling})
    *chunks, _ = events(answer.content)
    assert len(chunks) > 3
    for chunk in chunks:
        entries = chunk["meta_info"]["input_token_logprobs"]
        assert [token_id for _, token_id, _ in entries] == prompt
    assert num_scored == [len(prompt)]


async def test_a_streamed_batch_has_an_index_in_every_event(client: httpx.AsyncClient) -> None:
    body = {"input_ids": [[5], [6]], "stream": True, "sampling_params": {"max_new_tokens": 5}}
    *chunks, done = events((await client.post("/generate", json=body)).content)
    last = {chunk["index"]: chunk for chunk in chunks}
    assert [last[index]["output_ids"] for index in (0, 1)] == [[5] * 5, [6] * 5]
    assert done == "[DONE]"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_aborted_request_keeps_what_it_had(
    client: httpx.AsyncClient, gateway: Gateway, target: FakeTarget, is_stream: bool
) -> None:
    target.hold_after = 1
    target.reply = lambda request: [[68, 69, 70], [71]]
    body = {"text": "x", "rid": "r7", "stream": is_stream}
    request = asyncio.create_task(client.post("/generate", json=body))
    await eventually(lambda: gateway.pool.links[0].num_tokens == 3)
    await client.post("/abort_request", json={"rid": "r7"})
    response = await request
    assert response.status_code == 200
    answer = events(response.content)[-2] if is_stream else response.json()
    assert answer["output_ids"] == [68, 69, 70]
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    await target.until(lambda: len(target.cancelled) == 1)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": [512]}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
        (
            {"text": "a", "sampling_params": {"sampling_seed": 2**63}},
            "sampling_params.sampling_seed",
        ),
        ({"text": "a", "sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
        (
            {"text": "a", "sampling_params": {"regex": "a+", "ebnf": "root ::= x"}},
            "sampling_params.ebnf",
        ),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
        ({"text": "a", "speculation": {"num_tokens": 3}}, "speculation.num_tokens"),
        ({"text": 5}, "text"),
    ],
)
async def test_a_bad_field_is_refused_by_sglangs_name(
    client: httpx.AsyncClient, target: FakeTarget, body: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = await client.post("/generate", json={**body, "stream": stream})
        status, named, _, message = await error_of(response)
        assert (status, named) == (400, param)
        assert param in message or named in ("text", "sampling_params.stop")
    assert target.submits == []


async def test_tokens_that_a_request_names_have_log_probabilities(
    client: httpx.AsyncClient,
) -> None:
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "token_ids_logprob": [8, 9]}
    sampling = {"max_new_tokens": 2}
    info = (await generate(client, **body, sampling_params=sampling))["meta_info"]
    assert info["output_token_ids_logprobs"] == [[[-8.0, 8, None], [-9.0, 9, None]]] * 2
    assert info["input_token_ids_logprobs"] == []
    assert "output_top_logprobs" not in info
    scored = {"top_logprobs_num": 1, "logprob_start_len": 0, "stream": True}
    response = await client.post("/generate", json={**body, **scored, "sampling_params": sampling})
    info = events(response.content)[-2]["meta_info"]
    assert info["input_token_ids_logprobs"][0] is None
    assert info["input_token_ids_logprobs"][1:] == [[[-8.0, 8, None], [-9.0, 9, None]]] * 2
    assert all(len(top) == 1 for top in info["output_top_logprobs"])
    assert len(info["output_token_ids_logprobs"]) == 2


@pytest.mark.parametrize("is_stream", [False, True])
async def test_settings_may_differ_within_a_batch(
    client: httpx.AsyncClient, target: FakeTarget, is_stream: bool
) -> None:
    samplings = [
        {"max_new_tokens": 2, "temperature": 0.5, "n": 2},
        {"max_new_tokens": 4, "stop": "zz", "skip_special_tokens": False, "n": 2},
    ]
    body = {
        "input_ids": [[5, 6], [7, 8, 9]],
        "sampling_params": samplings,
        "return_logprob": [False, True],
        "top_logprobs_num": [0, 2],
        "token_ids_logprob": [None, [11]],
        "stream": is_stream,
    }
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    if is_stream:
        last = {each["index"]: each for each in events(response.content)[:-1]}
        answers = [last[index] for index in range(4)]
    else:
        answers = response.json()
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [2, 2, 4, 4]
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert "output_token_logprobs" not in answers[1]["meta_info"]
    info = answers[2]["meta_info"]
    assert [len(top) for top in info["output_top_logprobs"]] == [2] * 4
    assert info["output_token_ids_logprobs"] == [[[-11.0, 11, None]]] * 4
    asked = [submit.request for submit in target.submits]
    assert [list(each.prompt_token_ids) for each in asked] == [[5, 6], [5, 6], [7, 8, 9], [7, 8, 9]]
    assert [each.sampling_params.temperature for each in asked] == [0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sampling_params": [{}, {}, {}]}, "sampling_params"),
        ({"sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
        ({"sampling_params": [{}, {"top_k": -2}]}, "sampling_params.top_k"),
        ({"return_logprob": [True]}, "return_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [512]}, "token_ids_logprob"),
    ],
)
async def test_wrong_settings_of_a_batch_are_refused_by_name(
    client: httpx.AsyncClient, fields: Any, named: str
) -> None:
    response = await client.post("/generate", json={"input_ids": [[5], [6]], **fields})
    assert (await error_of(response))[:2] == (400, named)
