"""A short soak, and that it would notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.models.decoder import Decoder
from tests.helpers.lent_rounds import write_pair
from tests.soak import soak as module
from tests.soak.__main__ import decoders
from tests.soak.soak import Soak, SoakFailed


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    folder: Path = tmp_path_factory.mktemp("models")
    return decoders(folder, torch.device("cpu"))


def _run(soak: Soak, num_finished: int) -> None:
    for _ in soak.run(lambda: soak.figures.num_finished < num_finished):
        pass


@pytest.mark.parametrize("overlaps", [False, True])
def test_nothing_is_lost(models: dict[str, Decoder], overlaps: bool) -> None:
    soak = Soak(models["target"], models, 5, overlaps=overlaps)
    _run(soak, 60)
    figures = soak.figures
    assert figures.num_finished >= 60
    assert min(figures.num_accepted, figures.num_outcome_hits, figures.num_cancelled) > 0
    assert figures.num_preempted > 0
    assert figures.num_reconnects > 0


@pytest.mark.parametrize("chooses", [False, True])
def test_nothing_is_lost_where_the_device_selects_trees(
    models: dict[str, Decoder], chooses: bool
) -> None:
    soak = Soak(models["target"], models, 6, overlaps=True, selects=True, chooses=chooses)
    _run(soak, 60)
    figures = soak.figures
    assert min(figures.num_device_rounds, figures.num_outcome_hits, figures.num_cancelled) > 0
    assert figures.num_reconnects > 0


def test_nothing_is_lost_where_a_head_is_lent(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "target", tmp_path / "head", torch.device("cpu"))
    soak = Soak(pair.decoder, {}, 7, overlaps=True, head=pair.head)
    _run(soak, 60)
    figures = soak.figures
    assert min(figures.num_device_rounds, figures.num_accepted, figures.num_cancelled) > 0
    assert min(figures.num_preempted, figures.num_reconnects) > 0


def test_wrong_token_is_noticed(
    models: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = module.plain_outputs

    def changed(*args: object) -> list[list[int]]:
        return [[token + 1 for token in tokens] for tokens in plain(*args)]  # type: ignore[arg-type]

    monkeypatch.setattr(module, "plain_outputs", changed)
    with pytest.raises(SoakFailed, match="plain decoding gives"):
        _run(Soak(models["target"], models, 5, overlaps=True), 20)
