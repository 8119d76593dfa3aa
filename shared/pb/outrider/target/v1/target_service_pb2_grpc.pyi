
from collections import abc as _abc
from grpc import aio as _aio
from shared.pb.outrider.target.v1 import target_service_pb2 as _target_service_pb2
import abc as _abc_1



class TargetServiceStub:

    def __init__(self, channel: _aio.Channel) -> None: ...
    Generate: _aio.UnaryStreamMultiCallable[_target_service_pb2.GenerateRequest, _target_service_pb2.GenerateResponse]
    Session: _aio.StreamStreamMultiCallable[_target_service_pb2.SessionRequest, _target_service_pb2.SessionResponse]
    GetModel: _aio.UnaryUnaryMultiCallable[_target_service_pb2.GetModelRequest, _target_service_pb2.GetModelResponse]

class TargetServiceServicer(metaclass=_abc_1.ABCMeta):

    @_abc_1.abstractmethod
    def Generate(
        self,
        request: _target_service_pb2.GenerateRequest,
        context: _aio.ServicerContext[_target_service_pb2.GenerateRequest, _abc.AsyncIterator[_target_service_pb2.GenerateResponse]],
    ) -> _abc.AsyncIterator[_target_service_pb2.GenerateResponse]: ...

    @_abc_1.abstractmethod
    def Session(
        self,
        request_iterator: _abc.AsyncIterator[_target_service_pb2.SessionRequest],
        context: _aio.ServicerContext[_abc.AsyncIterator[_target_service_pb2.SessionRequest], _abc.AsyncIterator[_target_service_pb2.SessionResponse]],
    ) -> _abc.AsyncIterator[_target_service_pb2.SessionResponse]: ...

    @_abc_1.abstractmethod
    def GetModel(
        self,
        request: _target_service_pb2.GetModelRequest,
        context: _aio.ServicerContext[_target_service_pb2.GetModelRequest, _abc.Awaitable[_target_service_pb2.GetModelResponse]],
    ) -> _abc.Awaitable[_target_service_pb2.GetModelResponse]: ...

def add_TargetServiceServicer_to_server(servicer: TargetServiceServicer, server: _aio.Server) -> None: ...
