"""One place where a call gets its request id and where errors become statuses."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from shared.errors import EngineFailed, OutriderError
from shared.rpc.status import DETAILS_KEY, grpc_code, status_details
from shared.telemetry.request_id import REQUEST_ID_KEY, current_request_id, new_request_id

logger = logging.getLogger(__name__)
Context = aio.ServicerContext[Any, Any]


class ErrorInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]
    """Sets the request id, and turns an `OutriderError` into its rich status, once.

    Anything else that escapes a handler is our bug: the caller gets INTERNAL with the request id,
    the log gets the traceback. Aborts and cancellations pass through.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler.unary_unary is not None:
            return _rebuilt(grpc.unary_unary_rpc_method_handler, handler, handler.unary_unary)
        if handler.stream_unary is not None:
            return _rebuilt(grpc.stream_unary_rpc_method_handler, handler, handler.stream_unary)
        if handler.unary_stream is not None:
            return _rebuilt_stream(
                grpc.unary_stream_rpc_method_handler, handler, handler.unary_stream
            )
        return _rebuilt_stream(
            grpc.stream_stream_rpc_method_handler, handler, handler.stream_stream
        )


def _rebuilt(build: Callable[..., Any], handler: Any, behaviour: Callable[..., Any]) -> Any:
    async def respond(request: Any, context: Context) -> Any:
        _take_request_id(context)
        try:
            return await behaviour(request, context)
        except Exception as error:  # told apart in _abort
            await _abort(context, error)

    return build(respond, handler.request_deserializer, handler.response_serializer)


def _rebuilt_stream(build: Callable[..., Any], handler: Any, behaviour: Callable[..., Any]) -> Any:
    async def respond(request: Any, context: Context) -> AsyncIterator[Any]:
        _take_request_id(context)
        try:
            async for response in behaviour(request, context):
                yield response
        except Exception as error:  # told apart in _abort
            await _abort(context, error)

    return build(respond, handler.request_deserializer, handler.response_serializer)


def _take_request_id(context: Context) -> None:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str):
            current_request_id.set(value)
            return
    current_request_id.set(new_request_id())


async def _abort(context: Context, error: Exception) -> None:
    """Ends the call with the error's status; `context.abort` itself raises.

    Raises:
        Exception: `error`, when it is the one that an earlier abort raised.
    """
    if isinstance(error, aio.AbortError):
        raise error
    request_id = current_request_id.get()
    if not isinstance(error, OutriderError):
        logger.error("request %s failed", request_id, exc_info=error)
        error = EngineFailed.of()
    await context.abort(
        grpc_code(error),
        error.message,
        trailing_metadata=(
            (DETAILS_KEY, status_details(error, request_id)),
            (REQUEST_ID_KEY, request_id),
        ),
    )
