"""`make load-draft`: `ProposeTree` on a running draft, closed or open loop, to its knee.

A tree is one answer: its nodes are the tokens, and the time to the first is that of the whole.
"""

from __future__ import annotations

import argparse
import random
import sys

from grpc import aio

from shared.pb.outrider.draft.v1 import draft_service_pb2 as pb
from shared.pb.outrider.draft.v1 import draft_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from tests.load.connections import add_connection_flags, connect, run_program
from tests.load.sweep import Elapsed, add_sweep_flags, report, sweep, sweep_settings
from tests.load.timings import Timing


class DraftLoad:
    """Sends prompts of random tokens."""

    def __init__(self, channel: aio.Channel, flags: argparse.Namespace) -> None:
        self._stub = pb_grpc.DraftServiceStub(channel)
        self._flags = flags

    async def send(self, number: int, timing: Timing, elapsed: Elapsed) -> None:
        source, flags = random.Random(number), self._flags
        request = pb.ProposeTreeRequest(
            token_ids=[source.randrange(16, flags.vocab_size) for _ in range(flags.prompt_tokens)],
            sampling_params=sampling_pb2.SamplingParams(temperature=0.0, seed=number),
        )
        try:
            response = await self._stub.ProposeTree(request)
        except aio.AioRpcError as failure:
            timing.error = f"{failure.code().name}: {failure.details()}"
            return
        timing.token_s.append(elapsed())
        timing.num_tokens.append(len(response.tree.token_ids))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="load-draft", description=__doc__)
    add_connection_flags(parser, address="127.0.0.1:50061")
    add_sweep_flags(parser, loads="1,2,4,8,16,32", first_ms=250.0)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=2048, help="prompts hold ids below it")
    return parser.parse_args(arguments)


async def run(flags: argparse.Namespace) -> str:
    """Runs the sweep and returns what to print.

    Raises:
        AioRpcError: the draft does not answer.
    """
    settings = sweep_settings(flags)
    async with connect(flags) as channel:
        await pb_grpc.DraftServiceStub(channel).GetDraftInfo(pb.GetDraftInfoRequest(), timeout=5.0)
        points = await sweep(DraftLoad(channel, flags).send, settings)
    return report("draft", points, settings)


def main() -> int:
    return run_program("load-draft", parse(sys.argv[1:]), run)


if __name__ == "__main__":
    sys.exit(main())
