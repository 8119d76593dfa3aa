"""The mean of trained heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.draft.training.commands import average, averaged, parser
from services.draft.training.head_shape import Algorithm, HeadShape
from services.draft.training.heads import Head, build_head, load_head, save_head
from shared.errors import CheckpointError

SHAPE = HeadShape(
    algorithm=Algorithm.EAGLE3,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    vocab_size=40,
    draft_vocab_size=3,
    num_layers=1,
    num_target_layers=6,
    feature_layers=(1, 3, 5),
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=64,
)


def _head(seed: int, token_ids: list[int] | None = None, shape: HeadShape = SHAPE) -> Head:
    torch.manual_seed(seed)
    return build_head(shape, token_ids or [2, 5, 7])


def test_shares_weigh_what_is_written(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_head(_head(seed), tmp_path / str(seed), dtype=torch.float32)
    folders = [f"{tmp_path}/1", f"{tmp_path}/2=3"]
    average(parser("").parse_args(["average", "--head", *folders, "--out", f"{tmp_path}/mean"]))
    states = [load_head(tmp_path / name).state_dict() for name in ("1", "2", "mean")]
    for name, tensor in states[2].items():
        expected = states[0][name] * 0.25 + states[1][name] * 0.75
        # Heads are served as bfloat16.
        torch.testing.assert_close(tensor.float(), expected.float(), rtol=2**-8, atol=0.0)


def test_heads_that_differ_are_refused() -> None:
    wider = _head(2, shape=replace(SHAPE, intermediate_size=32))
    with pytest.raises(CheckpointError, match="head 2 has another shape than the first"):
        averaged([_head(1), wider], [1.0, 1.0])
    with pytest.raises(CheckpointError, match="heads differ in d2t"):
        averaged([_head(1), _head(2, [2, 5, 8])], [1.0, 1.0])


@pytest.mark.parametrize("share", ["0", "-1", "nan", "inf", "half"])
def test_a_share_that_weighs_nothing_or_everything_is_refused(
    share: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser("").parse_args(["average", "--head", "a", f"b={share}", "--out", "c"])
    assert f"{share}; it must be positive and finite" in capsys.readouterr().err
