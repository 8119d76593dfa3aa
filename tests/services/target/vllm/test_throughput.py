"""The rate of tokens, by a clock of the test's own."""

from __future__ import annotations

from services.target.vllm.vllm_engine_service import Throughput


def test_the_rate_is_that_between_questions_a_second_apart() -> None:
    now_s = 100.0
    throughput = Throughput(lambda: now_s)
    assert throughput.rate(0) == 0.0
    now_s = 102.0
    assert throughput.rate(50) == 25.0
    now_s = 102.5
    assert throughput.rate(1000) == 25.0, "too soon to tell"
    now_s = 103.0
    assert throughput.rate(1050) == 1000.0
    now_s = 110.0
    assert throughput.rate(1050) == 0.0, "nothing came since"
