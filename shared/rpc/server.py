"""gRPC servers with health, reflection and an interceptor, which sets the request id of a call and
turns errors into statuses; the lifecycle of their process and its ordered shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from shared.errors import (
    EngineFailed,
    InvalidArgument,
    OutriderError,
    SettingsError,
    Unavailable,
    Unimplemented,
)
from shared.rpc.channel import MAX_MESSAGE_BYTES, server_credentials, server_options
from shared.rpc.status import Metadata, abort_arguments, enter_request
from shared.tls import ServerTls

logger = logging.getLogger(__name__)

# Time to send the last responses. Streams of health watchers never end by themselves, so a longer
# grace would always be used up.
_RESPONSE_GRACE_S = 0.25


class State(enum.Enum):
    """Lifecycle of a process."""

    STARTING = "starting"
    ACTIVE = "active"
    DRAINING = "draining"


class Lifecycle:
    """Holds the state of a process and reports it by all of its health services.

    Health is SERVING only in ACTIVE. The empty service name is the whole process.

    Attributes:
        num_open: requests that have not ended; a drain waits for them.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self.state = State.STARTING
        self.num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._names = ("", *service_names)
        self._health: list[HealthServicer] = []

    async def new_health_servicer(self) -> HealthServicer:
        """Returns a health servicer for one server of the process."""
        servicer = HealthServicer()
        self._health.append(servicer)
        await self._update_health(servicer)
        return servicer

    async def activate(self) -> None:
        """Lets the process serve."""
        await self._enter(State.ACTIVE)

    async def drain(self) -> None:
        """Lets the process finish its requests and refuse new ones."""
        await self._enter(State.DRAINING)

    def check_open(self) -> None:
        """Raises:
        Unavailable: the process is draining; another one may serve.
        """
        if self.state is State.DRAINING:
            raise Unavailable.draining()

    def count(self, num_more: int) -> None:
        """Counts opened requests; -1 for a request that has ended. Called on the event loop."""
        self.num_open += num_more
        if self.num_open:
            self._is_idle.clear()
        else:
            self._is_idle.set()

    async def wait_idle(self, timeout_s: float) -> int:
        """Waits at most `timeout_s` until no request is open; returns how many still are."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        return self.num_open

    async def _enter(self, state: State) -> None:
        self.state = state
        for servicer in self._health:
            await self._update_health(servicer)

    async def _update_health(self, servicer: HealthServicer) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await servicer.set(name, serving if self.state is State.ACTIVE else not_serving)


async def stop_servers(
    servers: Sequence[aio.Server],
    lifecycle: Lifecycle,
    drain: Callable[[float], Awaitable[int]],
    *,
    grace_s: float,
) -> None:
    """Reports NOT_SERVING, drains, then stops the servers in the given order.

    `lifecycle.check_open` refuses new work from the start. The maintenance server is the last one,
    so that operators can watch the drain.

    Args:
        drain: asks drafts to detach and waits for running requests up to the given seconds;
            returns the number of running requests.
        grace_s: time for `drain`, which is cancelled if it takes longer.
    """
    await lifecycle.drain()
    try:
        async with asyncio.timeout(grace_s + _RESPONSE_GRACE_S):
            num_running = await drain(grace_s)
    except TimeoutError:
        logger.error("the drain took longer than the %g s it was given; cut off", grace_s)
    else:
        level = logging.WARNING if num_running else logging.INFO
        logger.log(level, "drained; %d requests are cut off", num_running)
    for server in servers:
        await server.stop(_RESPONSE_GRACE_S)


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
