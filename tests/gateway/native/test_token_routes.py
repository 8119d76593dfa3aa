"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from shared.text import Tokenizer
from tests.gateway.driving import MESSAGES, PROMPT, error_of, ids_of


async def test_a_prompt_becomes_its_tokens_their_count_and_the_context(
    client: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    for path in ("/tokenize", "/v1/tokenize"):
        answer = (await client.post(path, json={"model": "fake", "prompt": "the fox"})).json()
        token_ids = await ids_of(tokenizer, "the fox")
        assert answer == {
            "tokens": token_ids,
            "count": len(token_ids),
            "max_model_len": 4096,
            "token_strs": None,
        }


async def test_a_batch_has_lists_of_everything(
    client: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    body = {"prompt": ["the fox", "é"], "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["tokens"] == [await ids_of(tokenizer, text) for text in ("the fox", "é")]
    assert answer["count"] == [len(row) for row in answer["tokens"]]
    # As the vocabulary writes them, like vLLM: \u0120 stands for a space.
    assert answer["token_strs"] == [["the", "\u0120fox"], ["\u00c3", "\u00a9"]]


async def test_messages_are_counted_as_a_chat_counts_them(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/tokenize", json={"messages": MESSAGES})).json()
    chat = {"model": "fake", "messages": MESSAGES, "max_tokens": 1}
    usage = (await client.post("/v1/chat/completions", json=chat)).json()["usage"]
    assert answer["count"] == usage["prompt_tokens"]
    text = await client.post(
        "/detokenize", json={"tokens": answer["tokens"], "skip_special_tokens": False}
    )
    assert text.json()["text"] == PROMPT


async def test_the_generation_prompt_can_be_left_out(client: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "add_generation_prompt": False}
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    answer = await client.post("/detokenize", json={"tokens": tokens, "skip_special_tokens": False})
    assert answer.json()["prompt"] == PROMPT.removesuffix("<|assistant|>")


async def test_a_final_message_is_continued(client: httpx.AsyncClient) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "the fox"}]
    body = {"messages": messages, "continue_final_message": True}
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    answer = await client.post("/detokenize", json={"tokens": tokens, "skip_special_tokens": False})
    assert answer.json()["text"] == f"{PROMPT}the fox"


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
async def test_tokens_become_text_without_special_ones(
    client: httpx.AsyncClient, tokenizer: Tokenizer, path: str
) -> None:
    row = [*await ids_of(tokenizer, "the fox"), 0]
    one = await client.post(path, json={"tokens": row})
    assert one.json() == {"prompt": "the fox", "text": "the fox"}
    two = await client.post(path, json={"tokens": [row, []]})
    assert two.json()["text"] == ["the fox", ""]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "prompt_ambiguous"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt", "prompt_ambiguous"),
        ("/tokenize", {"prompt": []}, "prompt", "prompts_out_of_range"),
        ("/tokenize", {"messages": []}, "messages", "prompt_empty"),
        (
            "/tokenize",
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "field_invalid",
        ),
        (
            "/tokenize",
            {"messages": MESSAGES, "chat_template": "{{ messages }}"},
            "chat_template",
            "request_templates_off",
        ),
        ("/tokenize", {"prompt": "a", "documents": [{}]}, "documents", "not_implemented"),
        ("/detokenize", {}, "tokens", "field_invalid"),
        ("/detokenize", {"tokens": [512]}, "tokens", "token_out_of_range"),
        ("/detokenize", {"tokens": [[-1]]}, "tokens", "token_out_of_range"),
    ],
)
async def test_what_has_no_answer_is_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    assert (await error_of(await client.post(path, json=body)))[:3] == (400, param, code)


async def test_an_unknown_model_is_not_found(client: httpx.AsyncClient) -> None:
    response = await client.post("/tokenize", json={"model": "other", "prompt": "a"})
    assert (await error_of(response))[::2] == (404, "model_not_found")
