
from collections import abc as _abc
from grpc import aio as _aio
from shared.pb.outrider.admin.v1 import admin_service_pb2 as _admin_service_pb2
import abc as _abc_1



class AdminServiceStub:

    def __init__(self, channel: _aio.Channel) -> None: ...
    GetServerInfo: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.GetServerInfoRequest, _admin_service_pb2.GetServerInfoResponse]
    ListAttachments: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.ListAttachmentsRequest, _admin_service_pb2.ListAttachmentsResponse]
    DrainServer: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.DrainServerRequest, _admin_service_pb2.DrainServerResponse]
    FlushPrefixCache: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.FlushPrefixCacheRequest, _admin_service_pb2.FlushPrefixCacheResponse]
    UpdateDraftWeights: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.UpdateDraftWeightsRequest, _admin_service_pb2.UpdateDraftWeightsResponse]
    GetWeightStatus: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.GetWeightStatusRequest, _admin_service_pb2.GetWeightStatusResponse]
    PauseGeneration: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.PauseGenerationRequest, _admin_service_pb2.PauseGenerationResponse]
    ContinueGeneration: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.ContinueGenerationRequest, _admin_service_pb2.ContinueGenerationResponse]
    BeginWeightUpdate: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.BeginWeightUpdateRequest, _admin_service_pb2.BeginWeightUpdateResponse]
    UpdateWeights: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.UpdateWeightsRequest, _admin_service_pb2.UpdateWeightsResponse]
    EndWeightUpdate: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.EndWeightUpdateRequest, _admin_service_pb2.EndWeightUpdateResponse]
    InitWeightUpdateGroup: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.InitWeightUpdateGroupRequest, _admin_service_pb2.InitWeightUpdateGroupResponse]
    DestroyWeightUpdateGroup: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.DestroyWeightUpdateGroupRequest, _admin_service_pb2.DestroyWeightUpdateGroupResponse]
    CheckWeights: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.CheckWeightsRequest, _admin_service_pb2.CheckWeightsResponse]
    ReleaseMemory: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.ReleaseMemoryRequest, _admin_service_pb2.ReleaseMemoryResponse]
    ResumeMemory: _aio.UnaryUnaryMultiCallable[_admin_service_pb2.ResumeMemoryRequest, _admin_service_pb2.ResumeMemoryResponse]

class AdminServiceServicer(metaclass=_abc_1.ABCMeta):

    @_abc_1.abstractmethod
    def GetServerInfo(
        self,
        request: _admin_service_pb2.GetServerInfoRequest,
        context: _aio.ServicerContext[_admin_service_pb2.GetServerInfoRequest, _abc.Awaitable[_admin_service_pb2.GetServerInfoResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.GetServerInfoResponse]: ...

    @_abc_1.abstractmethod
    def ListAttachments(
        self,
        request: _admin_service_pb2.ListAttachmentsRequest,
        context: _aio.ServicerContext[_admin_service_pb2.ListAttachmentsRequest, _abc.Awaitable[_admin_service_pb2.ListAttachmentsResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.ListAttachmentsResponse]: ...

    @_abc_1.abstractmethod
    def DrainServer(
        self,
        request: _admin_service_pb2.DrainServerRequest,
        context: _aio.ServicerContext[_admin_service_pb2.DrainServerRequest, _abc.Awaitable[_admin_service_pb2.DrainServerResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.DrainServerResponse]: ...

    @_abc_1.abstractmethod
    def FlushPrefixCache(
        self,
        request: _admin_service_pb2.FlushPrefixCacheRequest,
        context: _aio.ServicerContext[_admin_service_pb2.FlushPrefixCacheRequest, _abc.Awaitable[_admin_service_pb2.FlushPrefixCacheResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.FlushPrefixCacheResponse]: ...

    @_abc_1.abstractmethod
    def UpdateDraftWeights(
        self,
        request: _admin_service_pb2.UpdateDraftWeightsRequest,
        context: _aio.ServicerContext[_admin_service_pb2.UpdateDraftWeightsRequest, _abc.Awaitable[_admin_service_pb2.UpdateDraftWeightsResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.UpdateDraftWeightsResponse]: ...

    @_abc_1.abstractmethod
    def GetWeightStatus(
        self,
        request: _admin_service_pb2.GetWeightStatusRequest,
        context: _aio.ServicerContext[_admin_service_pb2.GetWeightStatusRequest, _abc.Awaitable[_admin_service_pb2.GetWeightStatusResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.GetWeightStatusResponse]: ...

    @_abc_1.abstractmethod
    def PauseGeneration(
        self,
        request: _admin_service_pb2.PauseGenerationRequest,
        context: _aio.ServicerContext[_admin_service_pb2.PauseGenerationRequest, _abc.Awaitable[_admin_service_pb2.PauseGenerationResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.PauseGenerationResponse]: ...

    @_abc_1.abstractmethod
    def ContinueGeneration(
        self,
        request: _admin_service_pb2.ContinueGenerationRequest,
        context: _aio.ServicerContext[_admin_service_pb2.ContinueGenerationRequest, _abc.Awaitable[_admin_service_pb2.ContinueGenerationResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.ContinueGenerationResponse]: ...

    @_abc_1.abstractmethod
    def BeginWeightUpdate(
        self,
        request: _admin_service_pb2.BeginWeightUpdateRequest,
        context: _aio.ServicerContext[_admin_service_pb2.BeginWeightUpdateRequest, _abc.Awaitable[_admin_service_pb2.BeginWeightUpdateResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.BeginWeightUpdateResponse]: ...

    @_abc_1.abstractmethod
    def UpdateWeights(
        self,
        request: _admin_service_pb2.UpdateWeightsRequest,
        context: _aio.ServicerContext[_admin_service_pb2.UpdateWeightsRequest, _abc.Awaitable[_admin_service_pb2.UpdateWeightsResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.UpdateWeightsResponse]: ...

    @_abc_1.abstractmethod
    def EndWeightUpdate(
        self,
        request: _admin_service_pb2.EndWeightUpdateRequest,
        context: _aio.ServicerContext[_admin_service_pb2.EndWeightUpdateRequest, _abc.Awaitable[_admin_service_pb2.EndWeightUpdateResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.EndWeightUpdateResponse]: ...

    @_abc_1.abstractmethod
    def InitWeightUpdateGroup(
        self,
        request: _admin_service_pb2.InitWeightUpdateGroupRequest,
        context: _aio.ServicerContext[_admin_service_pb2.InitWeightUpdateGroupRequest, _abc.Awaitable[_admin_service_pb2.InitWeightUpdateGroupResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.InitWeightUpdateGroupResponse]: ...

    @_abc_1.abstractmethod
    def DestroyWeightUpdateGroup(
        self,
        request: _admin_service_pb2.DestroyWeightUpdateGroupRequest,
        context: _aio.ServicerContext[_admin_service_pb2.DestroyWeightUpdateGroupRequest, _abc.Awaitable[_admin_service_pb2.DestroyWeightUpdateGroupResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.DestroyWeightUpdateGroupResponse]: ...

    @_abc_1.abstractmethod
    def CheckWeights(
        self,
        request: _admin_service_pb2.CheckWeightsRequest,
        context: _aio.ServicerContext[_admin_service_pb2.CheckWeightsRequest, _abc.Awaitable[_admin_service_pb2.CheckWeightsResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.CheckWeightsResponse]: ...

    @_abc_1.abstractmethod
    def ReleaseMemory(
        self,
        request: _admin_service_pb2.ReleaseMemoryRequest,
        context: _aio.ServicerContext[_admin_service_pb2.ReleaseMemoryRequest, _abc.Awaitable[_admin_service_pb2.ReleaseMemoryResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.ReleaseMemoryResponse]: ...

    @_abc_1.abstractmethod
    def ResumeMemory(
        self,
        request: _admin_service_pb2.ResumeMemoryRequest,
        context: _aio.ServicerContext[_admin_service_pb2.ResumeMemoryRequest, _abc.Awaitable[_admin_service_pb2.ResumeMemoryResponse]],
    ) -> _abc.Awaitable[_admin_service_pb2.ResumeMemoryResponse]: ...

def add_AdminServiceServicer_to_server(servicer: AdminServiceServicer, server: _aio.Server) -> None: ...
