"""In the passes of `bench-async --adaptive` a draft that pays is taken up, and no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.adaptive import on_two_gpus
from tests.bench.modelled_passes import MODES, WARM_UP_TOKENS, ModelledPair
from tests.helpers.engines import tiny_decoder

DEAR_S = 0.0011
"""What each sequence at a draft adds to a step of a host on which drafts do not pay."""


def _pair(tmp_path: Path, size: int, attended_s: float | None = None) -> ModelledPair:
    split = on_two_gpus(0.9, size)
    if attended_s is not None:
        split = replace(split, attended_s=attended_s)
    return ModelledPair(tiny_decoder(tmp_path, num_layers=1), split, seed=0)


def _over_plain(pair: ModelledPair, size: int, num_passes: int) -> list[dict[str, float]]:
    num_requests, passes = max(4, size), list[dict[str, float]]()
    for num_tokens in (WARM_UP_TOKENS, *[128] * num_passes):
        speeds = {mode: pair.tokens_per_s(mode, num_requests, size, num_tokens) for mode in MODES}
        passes.append({mode: speed / speeds["plain"] for mode, speed in speeds.items()})
    return passes[1:]


def test_a_draft_that_pays_is_taken_up(tmp_path: Path) -> None:
    passes = _over_plain(_pair(tmp_path, 1), 1, 6)
    chosen = [each["as chosen"] for each in passes]
    assert all(each["ahead"] > 2.0 for each in passes), "it does pay"
    assert min(chosen) > 1.2, "although graphs of other depths are captured on the way"
    assert sorted(chosen[3:])[1] > 2.2


@pytest.mark.parametrize("size", [8, 32])
def test_a_draft_that_does_not_is_left_alone(tmp_path: Path, size: int) -> None:
    passes = _over_plain(_pair(tmp_path, size, DEAR_S), size, 6)
    chosen = [each["as chosen"] for each in passes]
    assert min(chosen) > 0.6, "each depth has to be tried"
    assert sum(chosen) / len(chosen) > 0.88, "a trial takes a tenth of a short pass"
    # A shape that an operator pinned is left alone as well.
    assert sum(each["ahead"] for each in passes) / len(passes) > 0.9
