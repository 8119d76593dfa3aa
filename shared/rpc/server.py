"""gRPC servers with health, reflection and an interceptor, which sets the request id of a call and
turns errors into statuses."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared.errors import (
    EngineFailed,
    InvalidArgument,
    OutriderError,
    SettingsError,
    Unimplemented,
)
from shared.rpc.channel import MAX_MESSAGE_BYTES, server_credentials, server_options
from shared.rpc.lifecycle import Lifecycle
from shared.rpc.status import Metadata, abort_arguments, enter_request
from shared.tls import ServerTls

logger = logging.getLogger(__name__)
Context = aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Any]

Registration = Callable[[aio.Server], None]


class ErrorInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]
    """Sets the request id of a call, and turns an `OutriderError` into a status with details.

    Any other exception of a handler is our bug: the caller gets INTERNAL with the request id, the
    log gets the traceback. Aborts and cancellations pass through.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method
            return None
        method = handler_call_details.method
        if handler.unary_unary is not None:
            build, behaviour = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        elif handler.stream_unary is not None:
            build, behaviour = grpc.stream_unary_rpc_method_handler, handler.stream_unary
        elif handler.unary_stream is not None:
            build, behaviour = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        else:
            build, behaviour = grpc.stream_stream_rpc_method_handler, handler.stream_stream
        deserialize = handler.request_deserializer
        return build(
            _guarded(behaviour, method),
            deserialize and partial(_deserialized, deserialize),
            handler.response_serializer,
        )


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Replaces a request that cannot be decoded, to which gRPC would answer with a Python error."""

    error: InvalidArgument


def _deserialized(deserialize: Callable[[bytes], Any], content: bytes) -> Any:
    try:
        return deserialize(content)
    except DecodeError:
        message = f"the request of {len(content):,} bytes is not the message of this method"
        return _Undecodable(InvalidArgument(message, reason="MESSAGE_UNDECODABLE"))


async def _checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yields requests.

    Raises:
        InvalidArgument: a request could not be decoded.
    """
    async for request in requests:
        if isinstance(request, _Undecodable):
            raise request.error
        yield request


def _guarded(behaviour: Behaviour, method: str) -> Behaviour:
    """Returns a handler's behaviour with its errors turned into statuses, as a coroutine function
    for streams and single responses alike."""
    is_stream = inspect.isasyncgenfunction(behaviour)

    async def guarded(request: Any, context: Context) -> Any:
        request_id = enter_request(cast("Metadata", context.invocation_metadata() or ()))
        try:
            if isinstance(request, _Undecodable):
                raise request.error
            if isinstance(request, AsyncIterator):
                request = _checked(request)
            if not is_stream:
                return await behaviour(request, context)
            # If the call ends first, the generator is closed at once: its `finally` does not wait
            # for the garbage collector.
            async with contextlib.aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    await context.write(response)
        except aio.AbortError:  # an intended end of the call
            raise
        except Exception as error:  # one that escaped from here would end the connection
            await _abort(context, error, method, request_id)

    return guarded


async def _abort(context: Context, error: Exception, method: str, request_id: str) -> NoReturn:
    """Ends the call with the error's status.

    Raises:
        AbortError: always, because gRPC ends a call that way.
    """
    if isinstance(error, NotImplementedError):  # raised by generated code for missing methods
        name = method.rpartition("/")[2]
        error = Unimplemented.of(name, "this process does not serve it")
    if not isinstance(error, OutriderError):
        if context.done():  # writing to a caller that has gone fails too, which is no bug
            logger.debug("%s failed after its caller had gone", method, exc_info=error)
        else:
            logger.error("%s failed", method, exc_info=error)
        error = EngineFailed(
            f"request {request_id} failed; see the server's log", reason="ENGINE_FAILED"
        )
    await context.abort(**abort_arguments(error, request_id))
    raise AssertionError("abort raises")


async def create_server(
    services: Sequence[ServiceDescriptor],
    register: Registration,
    lifecycle: Lifecycle,
    *,
    max_receive_bytes: int = MAX_MESSAGE_BYTES,
) -> aio.Server:
    """Returns a server, not started, of some services, health and reflection.

    Args:
        services: descriptors of the services that `register` adds, for reflection.
        register: adds the servicers, e.g. `add_TargetServiceServicer_to_server`.
        lifecycle: sets the server's health.
        max_receive_bytes: size of the largest message that is accepted.
    """
    server = aio.server(
        interceptors=[ErrorInterceptor()], options=server_options(max_receive_bytes)
    )
    register(server)
    health_pb2_grpc.add_HealthServicer_to_server(await lifecycle.new_health_servicer(), server)
    names = [service.full_name for service in services]
    reflection.enable_server_reflection(
        [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    return server


def bind(server: aio.Server, address: str, tls: ServerTls | None = None) -> int:
    """Binds `host:port`, port 0 for any, and returns the port.

    Args:
        tls: None is without TLS.

    Raises:
        SettingsError: the address is taken or not this host's.
    """
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(tls))
    except RuntimeError as error:
        raise _cannot_listen(address) from error
    if port == 0:  # how grpcio before 1.60 fails
        raise _cannot_listen(address)
    return port


def _cannot_listen(address: str) -> SettingsError:
    return SettingsError(
        (f"cannot listen on {address}: the port is taken, or the address is not of this host",)
    )
