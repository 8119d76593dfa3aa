"""Rounds in answers: each token's origin, the tree it came from, and nothing when nobody asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from gateway.answer import AnswerQueue
from gateway.generation import MAX_UNSENT_NODES, NodeBudget
from shared.generation import Delta, DraftAnswer, RoundTrace
from shared.text import Tokenizer
from shared.tokens import EMPTY_TREE, TokenTree
from tests.gateway.driving import CHAT, error_of, events, say
from tests.helpers.fake_target import FakeTarget

TEXT = "the quick brown fox jumps over"
TRACED = {**CHAT, "speculation": {"trace": True}}


async def _stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return [each for each in events(response.content) if each != "[DONE]"]


def _rounds(chunks: Sequence[Any]) -> list[Any]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [each for c in choices for each in c.get("speculation", {"rounds": []})["rounds"]]


def _texts(rounds: Sequence[Any]) -> str:
    return "".join(token["text"] for each in rounds for token in each["tokens"])


async def test_every_token_of_a_stream_tells_its_origin(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    token_ids = await say(target, tokenizer, TEXT)
    chunks = await _stream(client, "/v1/chat/completions", TRACED)
    content = "".join(c["delta"].get("content", "") for x in chunks for c in x["choices"])
    rounds = _rounds(chunks)
    assert content == _texts(rounds) == TEXT
    assert [token["id"] for each in rounds for token in each["tokens"]] == token_ids
    for each in rounds:
        *drafted, last = [token["source"] for token in each["tokens"]]
        assert set(drafted) <= {"accepted"}
        assert last == "bonus"


async def test_round_tells_its_tree_path_and_times(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    token_ids = await say(target, tokenizer, TEXT)
    rounds = _rounds(await _stream(client, "/v1/chat/completions", TRACED))
    assert [each["round"] for each in rounds] == list(range(len(rounds)))
    first = rounds[0]
    tree = first.pop("tree")
    assert tree["parents"] == [None, None, None, 2]
    assert tree["token_ids"] == [1, 2, *token_ids[:2]]
    assert tree["texts"][2:] == [tokenizer.decode([each]) for each in token_ids[:2]]
    assert tree["log_probs"] == [-1.0] * 4
    assert first.pop("tokens")
    assert first == {
        "round": 0,
        "algorithm": "FAKE",
        "rows": 5,
        "wait_ms": 2.0,
        "verify_ms": 4.0,
        "draft_ms": 1.0,
        "accepted_nodes": [2, 3],
    }


async def test_without_speculation_tokens_are_plain(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT)
    body = {**CHAT, "speculation": {"trace": True, "disable": True}}
    rounds = _rounds(await _stream(client, "/v1/chat/completions", body))
    assert {token["source"] for each in rounds for token in each["tokens"]} == {"plain"}
    assert {(each["tree"], each["algorithm"], each["draft_ms"]) for each in rounds} == {
        (None, None, None)
    }
    assert _texts(rounds) == TEXT


async def test_nobody_asks_nothing_is_told(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT)
    chunks = await _stream(client, "/v1/chat/completions", CHAT)
    assert not any("speculation" in choice for chunk in chunks for choice in chunk["choices"])
    assert not target.submits[0].request.speculation_params.trace


async def test_characters_cut_across_tokens_stay_whole(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "fox → dog ✓", per_step=1)
    rounds = _rounds(await _stream(client, "/v1/chat/completions", TRACED))
    assert _texts(rounds) == "fox → dog ✓"
    assert "\ufffd" not in _texts(rounds)


async def test_a_stop_string_cuts_the_round_it_ends(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT, per_step=8)
    chunks = await _stream(client, "/v1/chat/completions", {**TRACED, "stop": ["fox"]})
    content = "".join(c["delta"].get("content", "") for x in chunks for c in x["choices"])
    assert content == _texts(_rounds(chunks)) == "the quick brown "


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_other_streams_tell_rounds_too(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer, path: str
) -> None:
    await say(target, tokenizer, TEXT)
    speculation = {"trace": True}
    if path == "/generate":
        body = {"text": "then", "speculation": speculation}
        chunks = await _stream(client, path, body)
        rounds = [r for each in chunks for r in each["meta_info"].get("spec_rounds", [])]
        assert chunks[-1]["text"] == TEXT
    else:
        body = {"model": "fake", "prompt": "then", "max_tokens": 99, "speculation": speculation}
        rounds = _rounds(await _stream(client, path, body))
    assert [each["round"] for each in rounds] == list(range(len(rounds)))
    assert _texts(rounds) == TEXT


async def test_whole_answers_have_all_rounds(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT)
    chat = (await client.post("/v1/chat/completions", json=TRACED)).json()
    assert _texts(_rounds([chat])) == TEXT
    completion = {"model": "fake", "prompt": "a", "max_tokens": 99, "speculation": {"trace": True}}
    text = (await client.post("/v1/completions", json=completion)).json()
    assert _texts(_rounds([text])) == TEXT
    native = {"text": "a", "speculation": {"trace": True}}
    answer = (await client.post("/generate", json=native)).json()
    assert _texts(answer["meta_info"]["spec_rounds"]) == TEXT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": "fake", "input": "then"}),
        (
            "/v1/messages",
            {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
        ),
    ],
)
async def test_interfaces_without_a_place_for_rounds_refuse_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    response = await client.post(path, json={**body, "speculation": {"trace": True}})
    assert response.status_code == 400
    assert "speculation.trace" in response.json()["error"]["message"]


async def test_algorithm_travels_as_drafts_spell_it(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT)
    body = {**CHAT, "speculation": {"algorithm": "ngram"}}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert target.submits[0].request.speculation_params.algorithm == "NGRAM"


@pytest.mark.parametrize("name", ["", "x" * 65])
async def test_impossible_algorithm_is_refused_by_name(
    client: httpx.AsyncClient, name: str
) -> None:
    body = {**CHAT, "speculation": {"algorithm": name}}
    status, param, code, message = await error_of(
        await client.post("/v1/chat/completions", json=body)
    )
    assert (status, param, code) == (400, "speculation.algorithm", "algorithm_unknown")
    assert str(len(name)) in message


async def test_depth_of_trees_travels_with_the_request(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, TEXT)
    body = {**CHAT, "speculation": {"num_steps": 5}}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert target.submits[0].request.speculation_params.step_count == 5


@pytest.mark.parametrize(
    ("speculation", "field", "wanted"),
    [
        ({"outcome_budget": 0}, "outcome_budget", 0),
        ({"num_steps": 5}, "outcome_budget", None),
        ({"num_draft_tokens": 1}, "draft_token_count", 1),
        ({"num_steps": 5}, "draft_token_count", None),
    ],
)
async def test_tree_requests_travel_with_the_request_if_there_are_any(
    client: httpx.AsyncClient,
    target: FakeTarget,
    tokenizer: Tokenizer,
    speculation: dict[str, int],
    field: str,
    wanted: int | None,
) -> None:
    await say(target, tokenizer, TEXT)
    body = {**CHAT, "speculation": speculation}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    params = target.submits[-1].request.speculation_params
    found = getattr(params, field) if params.HasField(field) else None
    assert found == wanted


@pytest.mark.parametrize(
    ("field", "value", "limits"),
    [
        *(("num_steps", value, "[1, 32]") for value in (0, 33, -1)),
        *(("num_draft_tokens", value, "[1, 257]") for value in (0, 258, -1)),
        *(("outcome_budget", value, "[0, 64]") for value in (-1, 65)),
    ],
)
async def test_impossible_wish_of_a_draft_is_refused_with_its_limits(
    client: httpx.AsyncClient, field: str, value: int, limits: str
) -> None:
    body = {**CHAT, "speculation": {field: value}}
    response = await client.post("/v1/chat/completions", json=body)
    status, param, _, message = await error_of(response)
    assert (status, param) == (400, f"speculation.{field}")
    assert f"is {value}; it must be in {limits}" in message


async def test_server_info_names_model_and_drafts_of_a_target(
    client: httpx.AsyncClient, target: FakeTarget
) -> None:
    for algorithms in ((), ("EAGLE3", "NGRAM")):
        target.draft_algorithms = algorithms
        target.speculation_detail = "trees bring too little here" if algorithms else ""
        info = (await client.get("/server_info")).json()
        [found] = info["targets"]
        assert found["draft_algorithms"] == list(algorithms)
        assert found["speculation_detail"] == target.speculation_detail
        assert [found["model"]] == info["models"]


def _round(num_nodes: int) -> RoundTrace:
    tree = TokenTree.chain(range(num_nodes))
    return RoundTrace(0, tree, (0,), 1 + num_nodes, 0.1, 0.1, DraftAnswer("FAKE", 0.1))


def test_rounds_nobody_takes_lose_their_trees_at_the_bound() -> None:
    budget = NodeBudget(10)
    first, second = budget.admit(_round(8)), budget.admit(_round(8))
    assert first == _round(8)
    assert (second.tree, second.accepted_nodes) == (EMPTY_TREE, ())
    assert (second.round, second.num_rows) == (0, 9)
    assert second.draft == DraftAnswer("FAKE", 0.1)
    budget.num_nodes = 0
    assert budget.admit(_round(8)) == _round(8)


async def test_a_slow_client_keeps_its_tokens_and_loses_trees_only() -> None:
    box = AnswerQueue(max_unread_tokens=100, on_overflow=lambda: pytest.fail("it overflowed"))
    num_rounds = MAX_UNSENT_NODES // 256 + 3
    for _ in range(num_rounds):
        box.put(0, Delta([1, 2], num_accepted=1, trace=_round(256)))
    deltas = [event for _, event in await box.take() if isinstance(event, Delta)]
    assert [delta.token_ids for delta in deltas] == [[1, 2]] * num_rounds
    sizes = [len(delta.trace.tree) for delta in deltas if delta.trace is not None]
    assert sizes == [256] * (MAX_UNSENT_NODES // 256) + [0] * 3
