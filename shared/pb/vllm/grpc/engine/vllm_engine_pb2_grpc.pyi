
from collections import abc as _abc
from grpc import aio as _aio
from shared.pb.smg.grpc.common import common_pb2 as _common_pb2
from shared.pb.vllm.grpc.engine import vllm_engine_pb2 as _vllm_engine_pb2
import abc as _abc_1



class VllmEngineStub:

    def __init__(self, channel: _aio.Channel) -> None: ...
    Generate: _aio.UnaryStreamMultiCallable[_vllm_engine_pb2.GenerateRequest, _vllm_engine_pb2.GenerateResponse]
    Embed: _aio.UnaryUnaryMultiCallable[_vllm_engine_pb2.EmbedRequest, _vllm_engine_pb2.EmbedResponse]
    HealthCheck: _aio.UnaryUnaryMultiCallable[_vllm_engine_pb2.HealthCheckRequest, _vllm_engine_pb2.HealthCheckResponse]
    FlushCache: _aio.UnaryUnaryMultiCallable[_common_pb2.FlushCacheRequest, _common_pb2.FlushCacheResponse]
    StartProfile: _aio.UnaryUnaryMultiCallable[_common_pb2.StartProfileRequest, _common_pb2.ProfileResponse]
    StopProfile: _aio.UnaryUnaryMultiCallable[_common_pb2.StopProfileRequest, _common_pb2.ProfileResponse]
    Abort: _aio.UnaryUnaryMultiCallable[_vllm_engine_pb2.AbortRequest, _vllm_engine_pb2.AbortResponse]
    GetModelInfo: _aio.UnaryUnaryMultiCallable[_vllm_engine_pb2.GetModelInfoRequest, _vllm_engine_pb2.GetModelInfoResponse]
    GetServerInfo: _aio.UnaryUnaryMultiCallable[_vllm_engine_pb2.GetServerInfoRequest, _vllm_engine_pb2.GetServerInfoResponse]
    GetLoads: _aio.UnaryUnaryMultiCallable[_vllm_engine_pb2.GetLoadsRequest, _vllm_engine_pb2.GetLoadsResponse]
    GetTokenizer: _aio.UnaryStreamMultiCallable[_common_pb2.GetTokenizerRequest, _common_pb2.GetTokenizerChunk]
    SubscribeKvEvents: _aio.UnaryStreamMultiCallable[_common_pb2.SubscribeKvEventsRequest, _common_pb2.KvEventBatch]

class VllmEngineServicer(metaclass=_abc_1.ABCMeta):

    @_abc_1.abstractmethod
    def Generate(
        self,
        request: _vllm_engine_pb2.GenerateRequest,
        context: _aio.ServicerContext[_vllm_engine_pb2.GenerateRequest, _abc.AsyncIterator[_vllm_engine_pb2.GenerateResponse]],
    ) -> _abc.AsyncIterator[_vllm_engine_pb2.GenerateResponse]: ...

    @_abc_1.abstractmethod
    def Embed(
        self,
        request: _vllm_engine_pb2.EmbedRequest,
        context: _aio.ServicerContext[_vllm_engine_pb2.EmbedRequest, _abc.Awaitable[_vllm_engine_pb2.EmbedResponse]],
    ) -> _abc.Awaitable[_vllm_engine_pb2.EmbedResponse]: ...

    @_abc_1.abstractmethod
    def HealthCheck(
        self,
        request: _vllm_engine_pb2.HealthCheckRequest,
        context: _aio.ServicerContext[_vllm_engine_pb2.HealthCheckRequest, _abc.Awaitable[_vllm_engine_pb2.HealthCheckResponse]],
    ) -> _abc.Awaitable[_vllm_engine_pb2.HealthCheckResponse]: ...

    @_abc_1.abstractmethod
    def FlushCache(
        self,
        request: _common_pb2.FlushCacheRequest,
        context: _aio.ServicerContext[_common_pb2.FlushCacheRequest, _abc.Awaitable[_common_pb2.FlushCacheResponse]],
    ) -> _abc.Awaitable[_common_pb2.FlushCacheResponse]: ...

    @_abc_1.abstractmethod
    def StartProfile(
        self,
        request: _common_pb2.StartProfileRequest,
        context: _aio.ServicerContext[_common_pb2.StartProfileRequest, _abc.Awaitable[_common_pb2.ProfileResponse]],
    ) -> _abc.Awaitable[_common_pb2.ProfileResponse]: ...

    @_abc_1.abstractmethod
    def StopProfile(
        self,
        request: _common_pb2.StopProfileRequest,
        context: _aio.ServicerContext[_common_pb2.StopProfileRequest, _abc.Awaitable[_common_pb2.ProfileResponse]],
    ) -> _abc.Awaitable[_common_pb2.ProfileResponse]: ...

    @_abc_1.abstractmethod
    def Abort(
        self,
        request: _vllm_engine_pb2.AbortRequest,
        context: _aio.ServicerContext[_vllm_engine_pb2.AbortRequest, _abc.Awaitable[_vllm_engine_pb2.AbortResponse]],
    ) -> _abc.Awaitable[_vllm_engine_pb2.AbortResponse]: ...

    @_abc_1.abstractmethod
    def GetModelInfo(
        self,
        request: _vllm_engine_pb2.GetModelInfoRequest,
        context: _aio.ServicerContext[_vllm_engine_pb2.GetModelInfoRequest, _abc.Awaitable[_vllm_engine_pb2.GetModelInfoResponse]],
    ) -> _abc.Awaitable[_vllm_engine_pb2.GetModelInfoResponse]: ...

    @_abc_1.abstractmethod
    def GetServerInfo(
        self,
        request: _vllm_engine_pb2.GetServerInfoRequest,
        context: _aio.ServicerContext[_vllm_engine_pb2.GetServerInfoRequest, _abc.Awaitable[_vllm_engine_pb2.GetServerInfoResponse]],
    ) -> _abc.Awaitable[_vllm_engine_pb2.GetServerInfoResponse]: ...

    @_abc_1.abstractmethod
    def GetLoads(
        self,
        request: _vllm_engine_pb2.GetLoadsRequest,
        context: _aio.ServicerContext[_vllm_engine_pb2.GetLoadsRequest, _abc.Awaitable[_vllm_engine_pb2.GetLoadsResponse]],
    ) -> _abc.Awaitable[_vllm_engine_pb2.GetLoadsResponse]: ...

    @_abc_1.abstractmethod
    def GetTokenizer(
        self,
        request: _common_pb2.GetTokenizerRequest,
        context: _aio.ServicerContext[_common_pb2.GetTokenizerRequest, _abc.AsyncIterator[_common_pb2.GetTokenizerChunk]],
    ) -> _abc.AsyncIterator[_common_pb2.GetTokenizerChunk]: ...

    @_abc_1.abstractmethod
    def SubscribeKvEvents(
        self,
        request: _common_pb2.SubscribeKvEventsRequest,
        context: _aio.ServicerContext[_common_pb2.SubscribeKvEventsRequest, _abc.AsyncIterator[_common_pb2.KvEventBatch]],
    ) -> _abc.AsyncIterator[_common_pb2.KvEventBatch]: ...

def add_VllmEngineServicer_to_server(servicer: VllmEngineServicer, server: _aio.Server) -> None: ...
