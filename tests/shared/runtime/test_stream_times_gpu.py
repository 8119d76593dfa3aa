"""What a GPU has done is timed by the host's clock."""

from __future__ import annotations

import time

import pytest
import torch

from shared.runtime.stream_times import StreamTimes

CYCLES = 20_000_000


@pytest.mark.gpu
def test_parts_of_a_stream_are_between_their_launch_and_their_end() -> None:
    heard: list[tuple[str, float, float]] = []
    times = StreamTimes(torch.device("cuda:0"), lambda *span: heard.append(span))
    with torch.cuda.stream(torch.cuda.Stream()):
        begun_s = time.monotonic()
        for name, factor in (("short", 1), ("long", 32)):
            with times.span(name):
                torch.cuda._sleep(CYCLES * factor)
        assert not heard
        torch.cuda.synchronize()
        ended_s = time.monotonic()
        with times.span("next"):
            pass
    (_, start_s, middle_s), (name, later_s, end_s) = heard
    assert name == "long"
    assert begun_s - 1e-4 <= start_s < middle_s <= later_s < end_s <= ended_s + 1e-4
    # The clock that counts cycles may rise meanwhile, and other processes may take turns.
    assert end_s - later_s > 2.0 * (middle_s - start_s)
