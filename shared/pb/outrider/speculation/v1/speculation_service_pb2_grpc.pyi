
from collections import abc as _abc
from grpc import aio as _aio
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as _speculation_service_pb2
import abc as _abc_1



class SpeculationServiceStub:

    def __init__(self, channel: _aio.Channel) -> None: ...
    Speculate: _aio.StreamStreamMultiCallable[_speculation_service_pb2.SpeculateRequest, _speculation_service_pb2.SpeculateResponse]
    ReadTable: _aio.UnaryStreamMultiCallable[_speculation_service_pb2.ReadTableRequest, _speculation_service_pb2.ReadTableResponse]

class SpeculationServiceServicer(metaclass=_abc_1.ABCMeta):

    @_abc_1.abstractmethod
    def Speculate(
        self,
        request_iterator: _abc.AsyncIterator[_speculation_service_pb2.SpeculateRequest],
        context: _aio.ServicerContext[_abc.AsyncIterator[_speculation_service_pb2.SpeculateRequest], _abc.AsyncIterator[_speculation_service_pb2.SpeculateResponse]],
    ) -> _abc.AsyncIterator[_speculation_service_pb2.SpeculateResponse]: ...

    @_abc_1.abstractmethod
    def ReadTable(
        self,
        request: _speculation_service_pb2.ReadTableRequest,
        context: _aio.ServicerContext[_speculation_service_pb2.ReadTableRequest, _abc.AsyncIterator[_speculation_service_pb2.ReadTableResponse]],
    ) -> _abc.AsyncIterator[_speculation_service_pb2.ReadTableResponse]: ...

def add_SpeculationServiceServicer_to_server(servicer: SpeculationServiceServicer, server: _aio.Server) -> None: ...
