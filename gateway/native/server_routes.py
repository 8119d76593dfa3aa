"""Routes about the server: its model, its load, its speculation statistics, its caches, and its
tokenizer: token counts and ids of prompts, and the text of token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import Response

from gateway.answer import Answer
from gateway.api_keys import check_may_operate, current_quota
from gateway.event_stream import whole_answer
from gateway.failures import json_response, refused_by_target
from gateway.generation import TargetModel
from gateway.metrics import INTERVAL_S
from gateway.native.schema import AbortRequest, DetokenizeRequest, TokenizeRequest
from gateway.prompts import check_prompts, off_loop
from gateway.schema import ChatCompletionRequest, CompletionRequest, KnownFields
from gateway.serving import Gateway
from gateway.target_link import TargetLink
from shared.errors import FailedPrecondition, InvalidArgument
from shared.generation import check_token_ids
from shared.rpc.admin_client import TargetAdmin, TargetStatus

T = TypeVar("T")
_INLINE_TOKENS = 8_192


def add_history_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the route."""

    @app.get("/speculation_history", tags=["server"])
    async def speculation_history(model: str | None = None) -> dict[str, Any]:
        name = gateway.pool.model(model).name
        models = await _models(gateway)
        served = [model for model in models if model is not None and model.name == name]
        changes = sorted(
            (change for model in served for change in model.weight_changes),
            key=lambda change: change.time_s,
        )
        return {
            "model": name,
            "weight_versions": sorted({model.weight_version for model in served}),
            "interval_s": INTERVAL_S,
            "intervals": [
                {
                    "begin_time": interval.begin_s,
                    "verified_round_count": interval.num_verified_rounds,
                    "accepted_token_count": interval.num_accepted,
                }
                for interval in gateway.metrics.acceptance.intervals(name)
            ],
            "weight_changes": [
                {
                    "time": change.time_s,
                    "algorithm": change.algorithm or None,
                    "weight_version": change.version,
                }
                for change in changes
            ],
        }


def add_server_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the routes."""

    @app.get("/model_info", tags=["server"])
    @app.get("/get_model_info", tags=["server"])
    async def model_info(model: str | None = None) -> dict[str, Any]:
        served = gateway.pool.model(model)
        return {
            # The name that clients use; the path of the files is not disclosed.
            "model_path": served.name,
            "tokenizer_path": served.name,
            "is_generation": True,
            "max_model_len": served.max_context_tokens,
            "vocab_size": served.vocab_size,
            "tokenizer_sha256": served.tokenizer_sha256,
            "weight_version": _version(await _models(gateway)),
        }

    @app.get("/server_info", tags=["server"])
    @app.get("/get_server_info", tags=["server"])
    async def server_info() -> dict[str, Any]:
        speculation = gateway.metrics.acceptance.total
        statuses = [status for status in await target_statuses(gateway) if status is not None]
        first, models = statuses[0] if statuses else None, await _models(gateway)
        return {
            "tp_size": None if first is None else first.tp_size,
            "pp_size": None if first is None else first.pp_size,
            "ep_size": 1,
            "max_total_num_tokens": None if first is None else first.num_max_tokens,
            "enable_memory_saver": bool(statuses) and all(s.can_release for s in statuses),
            "weight_version": _version(models),
            "version": gateway.version,
            "status": gateway.lifecycle.state.value,
            "start_time": gateway.start_time_s,
            "models": sorted(gateway.pool.models()),
            "open_request_count": gateway.lifecycle.num_open,
            "targets": list(map(_target, gateway.pool.links, models)),
            # Load-testing tools read the mean acceptance length since start-up from here.
            "internal_states": [{"avg_spec_accept_length": speculation.mean_accepted_length}],
        }

    @app.get("/load", tags=["server"])
    async def load() -> dict[str, int]:
        return {"server_load": gateway.lifecycle.num_open}

    @app.get("/v1/loads", tags=["server"])
    async def loads() -> dict[str, Any]:
        statuses = await target_statuses(gateway)
        is_paired = len(statuses) == len(gateway.pool.links)
        paired = statuses if is_paired else [None] * len(gateway.pool.links)
        link_loads = [
            {
                "address": link.address,
                "num_running_reqs": link.num_live,
                "num_reserved_tokens": link.num_reserved_tokens,
                **_load(status),
            }
            for link, status in zip(gateway.pool.links, paired, strict=True)
        ]
        return {"loads": link_loads, "num_waiting_reqs": gateway.pool.num_waiting}

    @app.get("/tokenizer_info", tags=["server"])
    async def tokenizer_info() -> dict[str, Any]:
        tokenizer, template = gateway.text.tokenizer, gateway.text.template
        decode = tokenizer.decode
        return {
            **gateway.text.tokenizer_config,
            "vocab_size": len(tokenizer.token_bytes),
            "special_tokens": {
                str(token_id): decode([token_id], skip_special_tokens=False)
                for token_id in sorted(tokenizer.special_ids)
            },
            "chat_template": None if template is None else template.source,
        }

    @app.get("/health_generate", tags=["server"])
    async def health_generate(request: Request) -> dict[str, str]:
        body = CompletionRequest(prompt=[0], max_tokens=1, ignore_eos=True)
        plan = await gateway.planner.completion(body, gateway.pool.model(None))
        await whole_answer(Answer(plan, gateway, "health_generate"), request.receive)
        return {"status": "generating"}

    @app.get("/flush_cache", tags=["server"])
    @app.post("/flush_cache", tags=["server"])
    async def flush_cache() -> Response:
        check_may_operate("flush caches")
        admins = gateway.target_admins()
        try:
            freed = await asyncio.gather(*(admin.flush(only_when_idle=True) for admin in admins))
        except FailedPrecondition as error:
            return refused_by_target(error)
        pages = {admin.address: count for admin, count in zip(admins, freed, strict=True)}
        return json_response({"success": True, "freed_page_count": pages})

    @app.post("/abort_request", tags=["server"])
    async def abort_request(body: AbortRequest) -> dict[str, int]:
        quota = current_quota.get()
        owner = None if quota is None or quota.scope.may_operate else quota.name
        if body.abort_all:
            return {"aborted_request_count": gateway.abort(None, owner)}
        if not body.rid:
            message = "rid names no request; give one, or abort_all"
            raise InvalidArgument.of("RID_MISSING", "rid", message)
        return {"aborted_request_count": gateway.abort(body.rid, owner)}


def _load(status: TargetStatus | None) -> dict[str, Any]:
    """Returns the load that a target reports; empty when its maintenance port did not answer."""
    if status is None:
        return {}
    return {
        "num_running_reqs": status.num_running,
        "num_waiting_reqs": status.num_waiting,
        "num_used_tokens": status.num_used_tokens,
        "max_total_num_tokens": status.num_max_tokens,
        "token_usage": status.num_used_tokens / max(status.num_max_tokens, 1),
        "weight_version": status.weight_version,
        "paused": status.pause,
    }


async def target_statuses(gateway: Gateway) -> list[TargetStatus | None]:
    """Returns the status from each maintenance port; None for one that does not answer."""
    addresses, tls = gateway.settings.maintenance_addresses, gateway.settings.target_tls
    calls = (TargetAdmin(address, tls).status() for address in addresses)
    statuses = await asyncio.gather(*calls, return_exceptions=True)
    return [status if isinstance(status, TargetStatus) else None for status in statuses]


async def _models(gateway: Gateway) -> list[TargetModel | None]:
    """Asks each target for its model; None for a target that does not answer."""
    return await asyncio.gather(*(link.ask_model() for link in gateway.pool.links))


def _version(models: Sequence[TargetModel | None]) -> str | None:
    """Returns the version of the weights; None while targets have different versions."""
    versions = {model.weight_version for model in models if model is not None}
    return versions.pop() if len(versions) == 1 else None


def _target(link: TargetLink, model: TargetModel | None) -> dict[str, Any]:
    return {
        "address": link.address,
        "state": link.state.value,
        "detail": link.detail,
        "model": None if model is None else model.name,
        "live_request_count": link.num_live,
        "reserved_token_count": link.num_reserved_tokens,
        "received_token_count": link.num_tokens,
        "draft_algorithms": None if model is None else model.draft_algorithms,
        "weight_version": None if model is None else model.weight_version,
        "speculation_detail": None if model is None else model.speculation_detail,
    }


_TOKENIZE_FIELDS = KnownFields(unimplemented=frozenset({"documents", "mm_processor_kwargs"}))
_DETOKENIZE_FIELDS = KnownFields()


def add_token_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the routes, each also below `/v1`."""

    @app.post("/v1/tokenize", tags=["tokens"])
    @app.post("/tokenize", tags=["tokens"])
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        model = gateway.pool.model(body.model)
        _TOKENIZE_FIELDS.refuse(body)
        rows = await _encoded(body, gateway)
        is_batch = isinstance(body.prompt, list)
        answer: dict[str, Any] = {
            "tokens": rows if is_batch else rows[0],
            "count": [len(row) for row in rows] if is_batch else len(rows[0]),
            "max_model_len": model.max_context_tokens,
            "token_strs": None,
        }
        if body.return_token_strs:
            tokenizer = gateway.text.tokenizer
            strings = await _inline_if_short(
                "prompt", rows, lambda: list(map(tokenizer.entries, rows))
            )
            answer["token_strs"] = strings if is_batch else strings[0]
        return answer

    @app.post("/v1/detokenize", tags=["tokens"])
    @app.post("/detokenize", tags=["tokens"])
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        model = gateway.pool.model(body.model)
        _DETOKENIZE_FIELDS.refuse(body)
        rows = [row for row in body.tokens if not isinstance(row, int)]
        is_batch = bool(rows)
        if not is_batch:
            rows = [[token_id for token_id in body.tokens if isinstance(token_id, int)]]
        skip = body.skip_special_tokens is not False
        texts = await _inline_if_short(
            "tokens", rows, partial(_decoded, rows, model, skip, gateway)
        )
        text = texts if is_batch else texts[0]
        return {"prompt": text, "text": text}  # vLLM's name and SGLang's


async def _encoded(body: TokenizeRequest, gateway: Gateway) -> list[list[int]]:
    """Returns the token ids of each prompt, or of the single chat."""
    if (body.prompt is None) == (body.messages is None):
        message = "one of prompt and messages must be given"
        raise InvalidArgument.of("PROMPT_AMBIGUOUS", "prompt", message)
    if body.messages is not None:
        chat = ChatCompletionRequest(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=body.tools,
        )
        return [await gateway.planner.chat_prompt(chat)]
    texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
    check_prompts(gateway.settings, len(texts))
    add = body.add_special_tokens is not False
    return [await gateway.text.tokenizer.encode(text, add_special_tokens=add) for text in texts]


async def _inline_if_short(
    field: str, rows: Sequence[Sequence[int]], work: Callable[[], list[T]]
) -> list[T]:
    """Does the work here for few tokens, else off the event loop."""
    if sum(map(len, rows)) <= _INLINE_TOKENS:
        return work()
    return await off_loop(field, work)


def _decoded(
    rows: Sequence[Sequence[int]], model: TargetModel, skip: bool, gateway: Gateway
) -> list[str]:
    for row in rows:
        check_token_ids("tokens", row, model.vocab_size, reason="TOKEN_OUT_OF_RANGE")
    decode = gateway.text.tokenizer.decode
    return [decode(row, skip_special_tokens=skip) for row in rows]
