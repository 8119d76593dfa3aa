"""`make load-target`: load on a running target over gRPC, closed or open loop, to its knee."""

from __future__ import annotations

import argparse
import random
import sys

from grpc import aio

from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from tests.load.connections import add_connection_flags, connect, run_program
from tests.load.sweep import Elapsed, add_sweep_flags, report, sweep, sweep_settings
from tests.load.timings import Timing


class TargetLoad:
    """Sends `Generate` with random prompts, which no prefix cache knows."""

    def __init__(self, channel: aio.Channel, vocab_size: int, flags: argparse.Namespace) -> None:
        self._stub = pb_grpc.TargetServiceStub(channel)
        self._vocab_size = vocab_size
        self._flags = flags

    async def send(self, number: int, timing: Timing, elapsed: Elapsed) -> None:
        try:
            async for response in self._stub.Generate(self._request(number)):
                if response.HasField("delta"):
                    timing.token_s.append(elapsed())
                    timing.num_tokens.append(len(response.delta.token_ids))
        except aio.AioRpcError as failure:
            timing.error = f"{failure.code().name}: {failure.details()}"

    def _request(self, number: int) -> pb.GenerateRequest:
        source, flags = random.Random(number), self._flags
        low = min(16, self._vocab_size - 1)  # above what often are special tokens
        return pb.GenerateRequest(
            prompt_token_ids=[
                source.randrange(low, self._vocab_size) for _ in range(flags.prompt_tokens)
            ],
            sampling_params=sampling_pb2.SamplingParams(temperature=flags.temperature, seed=number),
            stop_params=sampling_pb2.StopParams(
                max_output_token_count=flags.output_tokens, ignore_eos=True
            ),
            speculation_params=pb.SpeculationParams(disabled=flags.no_speculation),
        )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="load-target", description=__doc__)
    add_connection_flags(parser, address="127.0.0.1:50051")
    add_sweep_flags(parser, loads="1,2,4,8,16,32,64", first_ms=1000.0)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--no-speculation", action="store_true", help="decode without candidates")
    return parser.parse_args(arguments)


async def run(flags: argparse.Namespace) -> str:
    """Runs the sweep and returns what to print.

    Raises:
        AioRpcError: the target does not answer.
    """
    settings = sweep_settings(flags)
    async with connect(flags) as channel:
        stub = pb_grpc.TargetServiceStub(channel)
        model = await stub.GetModel(pb.GetModelRequest(), timeout=5.0)
        load = TargetLoad(channel, model.vocab_size, flags)
        points = await sweep(load.send, settings)
    return report("target", points, settings)


def main() -> int:
    return run_program("load-target", parse(sys.argv[1:]), run)


if __name__ == "__main__":
    sys.exit(main())
