"""In the passes of `bench-async --adaptive` a draft that pays is taken up, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.adaptive import on_two_gpus
from tests.bench.modelled_passes import MODES, WARM_UP_TOKENS, ModelledPair
from tests.helpers.engines import tiny_decoder


def _pair(tmp_path: Path, size: int) -> ModelledPair:
    return ModelledPair(tiny_decoder(tmp_path), on_two_gpus(0.9, size), seed=0)


def _over_plain(pair: ModelledPair, size: int, num_passes: int) -> list[dict[str, float]]:
    num_requests, passes = max(4, size), list[dict[str, float]]()
    for num_tokens in (WARM_UP_TOKENS, *[128] * num_passes):
        speeds = {mode: pair.tokens_per_s(mode, num_requests, size, num_tokens) for mode in MODES}
        passes.append({mode: speed / speeds["plain"] for mode, speed in speeds.items()})
    return passes[1:]


def test_a_draft_that_pays_is_taken_up_from_the_first_pass_on(tmp_path: Path) -> None:
    passes = _over_plain(_pair(tmp_path, 1), 1, 3)
    for each in passes:
        assert each["ahead"] > 2.0, "it does pay"
        assert each["as chosen"] > 1.5, "although graphs of other depths are captured on the way"
    assert sorted(each["as chosen"] for each in passes)[1] > 2.2


@pytest.mark.parametrize("size", [8, 32])
def test_a_draft_that_does_not_is_left_alone(tmp_path: Path, size: int) -> None:
    _check_left_alone(_over_plain(_pair(tmp_path, size), size, 5))


def test_what_pays_for_one_is_left_alone_for_eight(tmp_path: Path) -> None:
    pair = _pair(tmp_path, 8)
    assert _over_plain(pair, 1, 1)[0]["as chosen"] > 1.5
    _check_left_alone(_over_plain(pair, 8, 5))


def _check_left_alone(passes: list[dict[str, float]]) -> None:
    assert max(each["ahead"] for each in passes) < 0.95
    chosen = [each["as chosen"] for each in passes]
    assert min(chosen) > 0.75, "it has to be tried"
    assert sum(chosen) / len(chosen) > 0.9
