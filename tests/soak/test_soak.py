"""A short soak, and that it would notice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.target.rounds import round_shapes
from shared.kv.states import StateStore
from shared.models.decoder import Decoder
from tests.helpers.engines import recurrent_decoder
from tests.helpers.mixtures import MIXTURES, load_mixture
from tests.helpers.shared_head_rounds import write_pair
from tests.soak import soak as module
from tests.soak.__main__ import decoders
from tests.soak.soak import Soak, SoakFailed, SoakFigures
from tests.soak.soak_time import SoakTime


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    folder: Path = tmp_path_factory.mktemp("models")
    return decoders(folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return recurrent_decoder(tmp_path_factory.mktemp("recurrent"))


@pytest.fixture
def few_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than run at a time: what is open at the end has to be served to its end. What rounds
    take is measured once a size."""
    monkeypatch.setattr(module, "MAX_OPEN", module.MAX_RUNNING + 1)
    monkeypatch.setattr(round_shapes, "_NUM_TIMED", 1)
    monkeypatch.setattr(round_shapes, "_TIMED_SIZES", (1, 4))


def _run(soak: Soak, num_finished: int, *happen: str) -> None:
    """Until so many requests have finished, or a few more, until all that is named has happened."""

    def goes_on() -> bool:
        figures = soak.figures
        has_happened = all(getattr(figures, name) for name in happen)
        return figures.num_finished < (num_finished if has_happened else 3 * num_finished)

    for _ in soak.run(goes_on):
        pass
    assert all(getattr(soak.figures, name) for name in happen), soak.figures


@pytest.mark.parametrize("overlaps", [False, True])
def test_nothing_is_lost(models: dict[str, Decoder], overlaps: bool) -> None:
    soak = Soak(models["target"], models, 5, overlaps=overlaps)
    hits = ("num_accepted", "num_outcome_hits")
    _run(soak, 10, *hits, "num_cancelled", "num_preempted", "num_reconnects")
    assert soak.figures.num_compared >= soak.figures.num_finished >= 10


@pytest.mark.parametrize("chooses", [False, True])
def test_nothing_is_lost_where_the_device_selects_trees(
    few_callers: None, models: dict[str, Decoder], chooses: bool
) -> None:
    soak = Soak(models["target"], models, 5, overlaps=True, selects=True, chooses=chooses)
    _run(soak, 6, "num_device_rounds", "num_outcome_hits", "num_cancelled", "num_reconnects")


# With these seeds everything happens early.
@pytest.mark.parametrize(("selects", "seed"), [(False, 9), (True, 5)])
def test_nothing_is_lost_with_recurrent_states(
    few_callers: None, models: dict[str, Decoder], recurrent: Decoder, selects: bool, seed: int
) -> None:
    soak = Soak(recurrent, models, seed, overlaps=True, selects=selects)
    happen = ("num_accepted", "num_cancelled", "num_reconnects")
    _run(soak, 4, *happen, "num_device_rounds" if selects else "num_preempted")


def test_a_soak_notices_a_stale_state(
    few_callers: None,
    models: dict[str, Decoder],
    recurrent: Decoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any state of a fitting length is taken for a sequence's own."""
    monkeypatch.setattr(
        StateStore, "_stamps_match", lambda self, stamps: np.ones_like(stamps, bool)
    )
    with pytest.raises(SoakFailed, match="plain decoding gives"):
        # With this seed it does so early.
        _run(Soak(recurrent, {"other": models["other"]}, 1, overlaps=True), 6)


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_nothing_is_lost_where_a_head_is_lent(
    few_callers: None, tmp_path: Path, is_recurrent: bool
) -> None:
    folders = tmp_path / "target", tmp_path / "head"
    pair = write_pair(*folders, torch.device("cpu"), is_recurrent=is_recurrent)
    # With this seed everything happens early.
    soak = Soak(pair.decoder, {}, 5, overlaps=True, head=pair.head)
    happen = ("num_device_rounds", "num_accepted", "num_cancelled", "num_reconnects")
    _run(soak, 6, *happen, *(() if is_recurrent else ("num_preempted",)))


def test_nothing_is_lost_where_a_model_drafts_ahead(
    few_callers: None, models: dict[str, Decoder], tmp_path: Path
) -> None:
    pair = write_pair(tmp_path / "target", tmp_path / "head", torch.device("cpu"))
    soak = Soak(pair.decoder, {}, 7, overlaps=True, head=pair.head, mapped=models["other"])
    happen = ("num_rounds_ahead", "num_accepted", "num_cancelled", "num_preempted")
    _run(soak, 6, *happen, "num_reconnects")


@pytest.mark.parametrize("family", MIXTURES)
def test_nothing_is_lost_of_a_mixture_by_its_own_layer(
    few_callers: None, family: str, tmp_path: Path
) -> None:
    pair = load_mixture(tmp_path, family, torch.device("cpu"))
    soak = Soak(pair.decoder, {}, 8, overlaps=True, head=pair.head)
    _run(soak, 4, "num_device_rounds", "num_accepted")


def test_wrong_token_is_noticed(
    models: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = module.plain_outputs

    def changed(*args: object) -> list[list[int]]:
        return [[token + 1 for token in tokens] for tokens in plain(*args)]  # type: ignore[arg-type]

    monkeypatch.setattr(module, "plain_outputs", changed)
    with pytest.raises(SoakFailed, match="plain decoding gives"):
        _run(Soak(models["target"], models, 5, overlaps=True), 8)


def test_a_soak_that_compared_nothing_fails(models: dict[str, Decoder]) -> None:
    with pytest.raises(SoakFailed, match="no output was compared"):
        list(Soak(models["target"], models, 5, overlaps=True).run(lambda: False))


def test_minutes_begin_when_the_first_request_has_finished() -> None:
    now_s, figures = [100.0], SoakFigures()
    time = SoakTime(figures, seconds=24.0, limit_s=300.0, clock=lambda: now_s[0])
    assert time.goes_on()
    now_s[0] += 34.0  # kernels are compiled
    assert time.goes_on()
    assert time.traffic_s == 0.0
    figures.num_finished = 1
    assert time.goes_on()
    now_s[0] += 23.0
    assert time.goes_on()
    now_s[0] += 1.0
    assert not time.goes_on()
    assert (time.warm_up_s, time.traffic_s) == (34.0, 24.0)


def test_a_warm_up_has_a_limit() -> None:
    now_s = [0.0]
    time = SoakTime(SoakFigures(), seconds=24.0, limit_s=60.0, clock=lambda: now_s[0])
    now_s[0] = 61.0
    with pytest.raises(SoakFailed, match=r"after 61 s; the warm-up may take 60 s"):
        time.goes_on()
