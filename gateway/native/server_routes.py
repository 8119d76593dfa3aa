"""What SGLang's clients ask about a server, and ask of it: model, figures, cache, abort."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request

from gateway.event_stream import whole_answer
from gateway.native.schema import AbortRequest
from gateway.quota import check_may_operate, current_quota
from gateway.schema import CompletionRequest
from gateway.serving import Gateway
from gateway.target_link import TargetLink
from shared.errors import FailedPrecondition, InvalidArgument
from shared.rpc.admin_client import flush_prefix_cache
from shared.telemetry.request_id import current_request_id

_FLUSH_TIMEOUT_S = 5.0


def add_server_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the routes."""

    @app.get("/model_info", tags=["server"])
    @app.get("/get_model_info", tags=["server"])
    async def model_info(model: str | None = None) -> dict[str, Any]:
        name, found = gateway.pool.model(model)
        return {
            # The name clients use: where the files lie is nobody's business.
            "model_path": name,
            "tokenizer_path": name,
            "is_generation": True,
            "max_model_len": found.max_context_tokens,
            "vocab_size": found.vocab_size,
            "tokenizer_sha256": found.tokenizer_sha256,
        }

    @app.get("/server_info", tags=["server"])
    @app.get("/get_server_info", tags=["server"])
    async def server_info() -> dict[str, Any]:
        speculation = gateway.metrics.speculation
        return {
            "version": gateway.version,
            "status": gateway.lifecycle.state.value,
            "start_time": gateway.start_time_s,
            "models": sorted(gateway.pool.models()),
            "open_request_count": gateway.open_answers.num_open,
            "targets": await asyncio.gather(
                *(_target(gateway, link) for link in gateway.pool.links)
            ),
            # Load tools take the mean over everything since the start from here.
            "internal_states": [{"avg_spec_accept_length": speculation.mean_accepted_length}],
        }

    @app.get("/load", tags=["server"])
    async def load() -> dict[str, int]:
        return {"server_load": gateway.open_answers.num_open}

    @app.get("/v1/loads", tags=["server"])
    async def loads() -> dict[str, Any]:
        each = [
            {
                "address": link.address,
                "num_running_reqs": link.num_live,
                "num_reserved_tokens": link.num_reserved_tokens,
            }
            for link in gateway.pool.links
        ]
        return {"loads": each, "num_waiting_reqs": gateway.pool.num_waiting}

    @app.get("/tokenizer_info", tags=["server"])
    async def tokenizer_info() -> dict[str, Any]:
        tokenizer, template = gateway.text.tokenizer, gateway.text.template
        decode = tokenizer.decode
        return {
            "vocab_size": len(tokenizer.token_bytes),
            "special_tokens": {
                str(token_id): decode([token_id], skip_special_tokens=False)
                for token_id in sorted(tokenizer.special_ids)
            },
            "chat_template": None if template is None else template.source,
        }

    @app.get("/health_generate", tags=["server"])
    async def health_generate(request: Request) -> dict[str, str]:
        name, model = gateway.pool.model(None)
        body = CompletionRequest(prompt=[0], max_tokens=1, ignore_eos=True)
        plan = await gateway.planner.completion(body, name, model, current_request_id.get())
        await whole_answer(gateway.answer(plan, "health_generate"), request.receive)
        return {"status": "generating"}

    @app.get("/flush_cache", tags=["server"])
    @app.post("/flush_cache", tags=["server"])
    async def flush_cache() -> dict[str, Any]:
        check_may_operate("flush caches")
        addresses = gateway.target_maintenance
        if not addresses:
            message = "flush_cache needs the targets' maintenance ports; set target_maintenance"
            raise FailedPrecondition(message, reason="TARGET_MAINTENANCE_UNSET")
        tls = gateway.target_tls
        calls = (flush_prefix_cache(address, _FLUSH_TIMEOUT_S, tls) for address in addresses)
        freed = await asyncio.gather(*calls)
        pages = dict(zip(addresses, freed, strict=True))
        return {"success": True, "freed_page_count": pages}

    @app.post("/abort_request", tags=["server"])
    async def abort_request(body: AbortRequest) -> dict[str, int]:
        quota = current_quota.get()
        owner = None if quota is None or quota.scope.may_operate else quota.name
        if body.abort_all:
            return {"aborted_request_count": gateway.open_answers.abort_all(owner)}
        if not body.rid:
            message = "rid names no request; give one, or abort_all"
            raise InvalidArgument.of("RID_MISSING", "rid", message)
        return {"aborted_request_count": gateway.open_answers.abort(body.rid, owner)}


async def _target(gateway: Gateway, link: TargetLink) -> dict[str, Any]:
    model = await link.ask_model()
    return {
        "address": link.address,
        "state": link.state.value,
        "detail": link.detail,
        "model": None if model is None else gateway.pool.served_name(model),
        "live_request_count": link.num_live,
        "reserved_token_count": link.num_reserved_tokens,
        "received_token_count": link.num_tokens,
        "draft_algorithms": None if model is None else model.draft_algorithms,
        "speculation_detail": None if model is None else model.speculation_detail,
    }
