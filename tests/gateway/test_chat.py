"""`/v1/chat/completions` as the real openai client sees it, over a real socket."""

from __future__ import annotations

from collections import defaultdict

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from shared.text import Tokenizer
from tests.gateway.driving import MESSAGES, PROMPT, ids_of, in_steps, say
from tests.helpers.fake_target import FakeTarget

TEXT = "héllo 🦊 fox"


async def chunks_of(client: AsyncOpenAI, **options: object) -> list[ChatCompletionChunk]:
    stream = await client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, **options
    )
    return [chunk async for chunk in stream]


async def test_a_whole_answer_carries_text_usage_and_finish_reason(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    output = await say(target, tokenizer, TEXT)
    target.num_cached_tokens = 2
    answer = await openai_client.chat.completions.create(model="fake", messages=MESSAGES)
    choice, usage = answer.choices[0], answer.usage
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert choice.finish_reason == "stop"
    prompt = await ids_of(tokenizer, PROMPT)
    assert target.submits[0].request.prompt_token_ids == prompt
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(output))
    assert usage.total_tokens == len(prompt) + len(output)
    assert usage.prompt_tokens_details.cached_tokens == 2


async def test_speculation_is_reported_in_usage_and_metrics(
    openai_client: AsyncOpenAI, target: FakeTarget
) -> None:
    target.reply = lambda request: [[10, 11, 12], [13], [14, 15, 0]]
    answer = await openai_client.chat.completions.create(model="fake", messages=MESSAGES)
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    # Accepted 2 + 0 + 2 of 4 + 2 + 4 drafted in three rounds.
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 6)
    assert answer.model_extra is not None
    assert answer.model_extra["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": pytest.approx(1 + 4 / 3),
        "draft_acceptance_rate": pytest.approx(0.4),
        "acceptance_histogram": [1, 0, 2],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 10,
        "num_spec_tokens": 2,
    }


async def test_speculation_can_be_disabled_for_one_request(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT)
    answer = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, extra_body={"speculation": {"disable": True}}
    )
    assert target.submits[0].request.speculation_params.disabled
    assert answer.choices[0].message.content == TEXT
    assert answer.model_extra is not None
    metrics = answer.model_extra["metrics"]
    assert metrics.pop("speculative_decoding") is None
    assert all(value >= 0.0 for value in metrics.values())
    assert metrics["time_to_first_token_ms"] >= metrics["queue_time_ms"]


async def test_a_stream_is_role_then_deltas_then_finish_then_usage(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    output = await say(target, tokenizer, TEXT)
    chunks = await chunks_of(openai_client, stream_options={"include_usage": True})
    role, *deltas, finish, last = chunks
    assert role.choices[0].delta.role == "assistant"
    assert role.choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == TEXT
    assert all(chunk.choices[0].finish_reason is None for chunk in [role, *deltas])
    assert all(chunk.choices[0].delta.content for chunk in deltas)
    assert all(chunk.choices[0].delta.role is None for chunk in deltas)
    assert finish.choices[0].finish_reason == "stop"
    assert finish.choices[0].delta.model_dump(exclude_unset=True) == {}
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(output)
    assert last.model_extra is not None
    assert last.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert all("usage" in c.model_fields_set and c.usage is None for c in chunks[:-1])
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1


async def test_without_include_usage_no_chunk_has_usage(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT)
    for options in ({}, {"continuous_usage_stats": True}):  # vLLM's, which needs the other
        chunks = await chunks_of(openai_client, stream_options=options)
        assert all("usage" not in chunk.model_fields_set for chunk in chunks)
        assert all(chunk.choices for chunk in chunks)


async def test_continuous_usage_grows_to_the_final_count(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await chunks_of(openai_client, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == len(await ids_of(tokenizer, TEXT)) + 1


async def test_characters_split_over_tokens_and_steps_are_never_cut(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    text = "a🦊é漢字👩‍🚀z"
    assert len(await ids_of(tokenizer, text)) > len(text)
    await say(target, tokenizer, text, per_step=1)
    chunks = await chunks_of(openai_client)
    contents = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(contents) == text
    assert all("\ufffd" not in content for content in contents)


async def test_bytes_that_never_become_a_character_are_replaced_at_the_end(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    whole = await ids_of(tokenizer, "a🦊")
    target.reply = lambda request: [[*whole[:-1], 0]]
    answer = await openai_client.chat.completions.create(model="fake", messages=MESSAGES)
    assert answer.choices[0].message.content == "a\ufffd"


async def test_choices_of_a_stream_stay_apart(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    texts = {seed: await ids_of(tokenizer, f"choice of {seed}") for seed in range(3)}
    order: list[int] = []

    def reply(request: object) -> list[list[int]]:
        order.append(len(order))
        return [[token_id] for token_id in (*texts[order[-1]], 0)]

    target.reply = reply
    chunks = await chunks_of(openai_client, n=3)
    by_index: dict[int, list[ChatCompletionChunk]] = defaultdict(list)
    for chunk in chunks:
        by_index[chunk.choices[0].index].append(chunk)
    assert sorted(by_index) == [0, 1, 2]
    for index, (role, *deltas, finish) in by_index.items():
        assert role.choices[0].delta.role == "assistant"
        contents = [chunk.choices[0].delta.content or "" for chunk in deltas]
        assert "".join(contents) == f"choice of {index}"
        assert finish.choices[0].finish_reason == "stop"


async def test_each_choice_has_its_own_seed_and_the_first_the_requests(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    output = await say(target, tokenizer, TEXT)
    answer = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, n=4, seed=7
    )
    seeds = [submit.request.sampling_params.seed for submit in target.submits]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4 * len(output)
    assert answer.usage.prompt_tokens == len(await ids_of(tokenizer, PROMPT))


async def test_without_a_seed_the_target_draws_one(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT)
    await openai_client.chat.completions.create(model="fake", messages=MESSAGES)
    assert not target.submits[0].request.sampling_params.HasField("seed")


async def test_every_sampling_field_reaches_the_target(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT)
    await openai_client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        temperature=0.5,
        top_p=0.75,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        logit_bias={"5": 2.0},
        max_completion_tokens=40,
        extra_body={
            "top_k": 8,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 3,
            "stop_token_ids": [9],
            "ignore_eos": True,
        },
    )
    request = target.submits[0].request
    sampling, stop = request.sampling_params, request.stop_params
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 8)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.25, -0.5)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.5)
    assert dict(sampling.logit_bias) == {5: 2.0}
    assert (stop.max_output_token_count, stop.min_output_token_count) == (40, 3)
    assert (list(stop.stop_token_ids), stop.ignore_eos) == ([9], True)


async def test_a_chat_may_fill_the_context_by_default(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT)
    await openai_client.chat.completions.create(model="fake", messages=MESSAGES)
    num_prompt = len(await ids_of(tokenizer, PROMPT))
    limit = target.submits[0].request.stop_params.max_output_token_count
    assert limit == target.max_context_tokens - num_prompt


async def test_logprobs_name_token_bytes_and_alternatives(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    output = await say(target, tokenizer, "é")
    answer = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == len(output)
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs.content[:-1]) == "é".encode()
    first = logprobs.content[0]
    assert first.logprob == pytest.approx(-0.5)
    assert [top.logprob for top in first.top_logprobs] == pytest.approx([-0.5, -1.25])
    assert first.top_logprobs[0].bytes == first.bytes


async def test_streamed_logprobs_add_up_to_the_whole_answers(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    output = await say(target, tokenizer, TEXT, per_step=2)
    chunks = await chunks_of(openai_client, logprobs=True)
    entries = [
        entry
        for chunk in chunks
        if (logprobs := chunk.choices[0].logprobs) is not None
        for entry in logprobs.content or ()
    ]
    assert len(entries) == len(output)
    assert all(entry.top_logprobs == [] for entry in entries)


async def test_null_top_logprobs_are_off(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT)
    answer = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, logprobs=None, top_logprobs=None
    )
    assert not target.submits[0].request.HasField("top_logprob_count")
    assert answer.choices[0].logprobs is None


async def test_a_stop_string_across_chunks_ends_the_choice_and_is_not_sent(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "one END two three four", per_step=1)
    target.hold_after = len(await ids_of(tokenizer, "one END two"))
    chunks = await chunks_of(openai_client, stop=["END"], stream_options={"include_usage": True})
    *deltas, finish, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == "one "
    assert finish.choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert last.usage.completion_tokens == len(await ids_of(tokenizer, "one END"))
    await target.until(lambda: target.cancelled == [target.submits[0].request_id])


async def test_a_stop_string_inside_a_step_cuts_text_tokens_and_counts(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    token_ids = await ids_of(tokenizer, "one END two")
    target.reply = lambda request: in_steps([*token_ids, 0], 100)
    answer = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, stop="END", extra_body={"return_token_ids": True}
    )
    kept = await ids_of(tokenizer, "one END")
    choice = answer.choices[0]
    assert choice.message.content == "one "
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == kept
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(kept)
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == len(kept)
    assert details.rejected_prediction_tokens == 2


async def test_a_stop_string_can_be_kept(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "one END two")
    answer = await openai_client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        stop="END",
        extra_body={"include_stop_str_in_output": True},
    )
    assert answer.choices[0].message.content == "one END"


async def test_what_only_looks_like_a_stop_string_is_sent_in_the_end(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "one EN", per_step=1)
    answer = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, stop=["END"]
    )
    assert answer.choices[0].message.content == "one EN"


async def test_a_stop_token_ends_the_text_before_it(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    first, last = await ids_of(tokenizer, "ab")
    target.reply = lambda request: [[first, last, first]]
    options = {"stop_token_ids": [last]}
    answer = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, extra_body=options
    )
    assert answer.choices[0].message.content == "a"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    answer = await openai_client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        extra_body={**options, "include_stop_str_in_output": True},
    )
    assert answer.choices[0].message.content == "ab"


async def test_the_output_limit_ends_with_length(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "there and then the other thing", per_step=2)
    answer = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=3
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_token_ids_are_returned_on_request(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    output = await say(target, tokenizer, TEXT)
    prompt = await ids_of(tokenizer, PROMPT)
    chunks = await chunks_of(openai_client, extra_body={"return_token_ids": True})
    assert chunks[0].model_extra is not None
    assert chunks[0].model_extra["prompt_token_ids"] == prompt
    streamed = [
        token_id
        for chunk in chunks
        for token_id in (chunk.choices[0].model_extra or {}).get("token_ids", ())
    ]
    assert streamed == output
    answer = await openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == output


async def test_content_parts_and_developer_messages_are_text(
    openai_client: AsyncOpenAI, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await openai_client.chat.completions.create(
        model="fake",
        messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": parts}],
    )
    prompt = "<|system|>be<|end|><|user|>one\ntwo<|end|><|assistant|>"
    assert target.submits[0].request.prompt_token_ids == await ids_of(tokenizer, prompt)
