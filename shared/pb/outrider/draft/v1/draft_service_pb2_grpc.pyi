
from collections import abc as _abc
from grpc import aio as _aio
from shared.pb.outrider.draft.v1 import draft_service_pb2 as _draft_service_pb2
import abc as _abc_1



class DraftServiceStub:

    def __init__(self, channel: _aio.Channel) -> None: ...
    ProposeTree: _aio.UnaryUnaryMultiCallable[_draft_service_pb2.ProposeTreeRequest, _draft_service_pb2.ProposeTreeResponse]
    GetDraftInfo: _aio.UnaryUnaryMultiCallable[_draft_service_pb2.GetDraftInfoRequest, _draft_service_pb2.GetDraftInfoResponse]
    UpdateDraftConfig: _aio.UnaryUnaryMultiCallable[_draft_service_pb2.UpdateDraftConfigRequest, _draft_service_pb2.UpdateDraftConfigResponse]

class DraftServiceServicer(metaclass=_abc_1.ABCMeta):

    @_abc_1.abstractmethod
    def ProposeTree(
        self,
        request: _draft_service_pb2.ProposeTreeRequest,
        context: _aio.ServicerContext[_draft_service_pb2.ProposeTreeRequest, _abc.Awaitable[_draft_service_pb2.ProposeTreeResponse]],
    ) -> _abc.Awaitable[_draft_service_pb2.ProposeTreeResponse]: ...

    @_abc_1.abstractmethod
    def GetDraftInfo(
        self,
        request: _draft_service_pb2.GetDraftInfoRequest,
        context: _aio.ServicerContext[_draft_service_pb2.GetDraftInfoRequest, _abc.Awaitable[_draft_service_pb2.GetDraftInfoResponse]],
    ) -> _abc.Awaitable[_draft_service_pb2.GetDraftInfoResponse]: ...

    @_abc_1.abstractmethod
    def UpdateDraftConfig(
        self,
        request: _draft_service_pb2.UpdateDraftConfigRequest,
        context: _aio.ServicerContext[_draft_service_pb2.UpdateDraftConfigRequest, _abc.Awaitable[_draft_service_pb2.UpdateDraftConfigResponse]],
    ) -> _abc.Awaitable[_draft_service_pb2.UpdateDraftConfigResponse]: ...

def add_DraftServiceServicer_to_server(servicer: DraftServiceServicer, server: _aio.Server) -> None: ...
