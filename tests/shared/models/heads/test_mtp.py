"""Next-token layers of real key names against a plainly written oracle, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.errors import CheckpointError
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.heads.head import DraftHead
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.mtp_heads import MtpOracle, TinyMtp, change_mtp, write_mtp
from tests.helpers.pooled_heads import HeadRunner

CPU = torch.device("cpu")
PAGE_SIZE = 4
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 60]
MTPS = {
    "deepseek": TinyMtp(),
    "deepseek on qwen2": TinyMtp(family="qwen2"),
    "deepseek on qwen3": TinyMtp(family="qwen3", num_layers=2),
    "deepseek with copies": TinyMtp(num_layers=2, has_copies=True),
    "mimo": TinyMtp("mimo"),
    "mimo of 3 layers": TinyMtp("mimo", num_layers=3),
}


def _load(folder: Path, target: Path | None = None) -> DraftHead:
    tensors = TargetFolder(target or folder, dtype=torch.float32, device=CPU)
    return load_mtp(folder, tensors, dtype=torch.float32, device=CPU)


def _features(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, 32, generator=torch.Generator().manual_seed(seed))


def _states(
    runner: HeadRunner, tokens: Sequence[int], hidden: Tensor, *, layer: int = 0, start: int = 0
) -> Tensor:
    rows = SequenceRows.causal(tokens, start, range(1, 6))
    return runner.states(build_batch([rows], page_size=PAGE_SIZE, device=CPU), hidden, layer=layer)


def _runner(head: DraftHead) -> HeadRunner:
    return HeadRunner(head, KvPool(head.kv_layout(PAGE_SIZE), 8, CPU))


def _close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cuts", [(10,), (1,) * 10, (3, 4, 3)], ids=str)
@pytest.mark.parametrize("name", MTPS)
def test_every_layer_computes_what_the_oracle_says(
    name: str, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_mtp(tmp_path, MTPS[name])
    runner, oracle = _runner(_load(folder)), MtpOracle(MTPS[name], folder)
    hidden = _features(len(TOKENS) - 1)
    for layer in range(MTPS[name].num_layers):
        parts, start = [], 0
        for count in cuts:
            part = slice(start, start + count)
            parts.append(_states(runner, TOKENS[1:][part], hidden[part], layer=layer, start=start))
            start += count
        states = oracle.states(layer, TOKENS[1:], hidden)
        _close(torch.cat(parts), states)
        _close(runner.logits(torch.cat(parts)), oracle.logits(states))
        hidden = states


@pytest.mark.parametrize(
    ("style", "token_half"), [("deepseek", slice(0, 32)), ("mimo", slice(32, 64))]
)
def test_the_token_enters_by_its_own_half_of_the_projection(
    style: str, token_half: slice, tmp_path: Path
) -> None:
    mtp = TinyMtp(style)
    folder = write_mtp(tmp_path, mtp)
    key = f"{mtp.prefix(0)}{'input_proj' if style == 'mimo' else 'eh_proj'}.weight"
    projection = MtpOracle(mtp, folder).tensors[key].clone()
    projection[:, token_half] = 0.0
    change_mtp(folder, tensors={key: projection})
    runner, hidden = _runner(_load(folder)), _features(3)
    _close(_states(runner, [1, 2, 3], hidden), _states(runner, [7, 8, 9], hidden))
    others = _states(runner, [1, 2, 3], _features(3, seed=1))
    assert not torch.allclose(_states(runner, [1, 2, 3], hidden), others, atol=1e-2)


@pytest.mark.parametrize(("style", "is_blind"), [("mimo", True), ("deepseek", False)])
def test_only_mimo_does_not_see_the_token_at_position_0(
    style: str, is_blind: bool, tmp_path: Path
) -> None:
    runner, hidden = _runner(_load(write_mtp(tmp_path, TinyMtp(style)))), _features(3)
    one, other = _states(runner, [1, 2, 3], hidden), _states(runner, [9, 2, 3], hidden)
    assert torch.allclose(one, other, atol=1e-6) == is_blind
    later = _states(runner, [1, 9, 3], hidden)
    assert not torch.allclose(one[1:], later[1:], atol=1e-2)


def test_features_are_the_target_s_states_after_its_final_norm(tmp_path: Path) -> None:
    head = _load(write_mtp(tmp_path, TinyMtp()))
    assert (head.feature_spec.layer_indices, head.feature_spec.width) == ((4,), 32)
    assert head.feature_spec.projection is None


def test_embedding_and_lm_head_are_the_target_s_own(tmp_path: Path) -> None:
    mtp = TinyMtp(has_copies=True)
    folder = write_mtp(tmp_path, mtp)
    tensors = TargetFolder(folder, dtype=torch.float32, device=CPU)
    head = load_mtp(folder, tensors, dtype=torch.float32, device=CPU)
    assert head.embedding is tensors.embedding()


@pytest.mark.parametrize("style", ["deepseek", "mimo"])
def test_the_decoder_of_the_same_folder_loads_without_the_layers(
    style: str, tmp_path: Path
) -> None:
    decoder = load_decoder(write_mtp(tmp_path, TinyMtp(style)), dtype=torch.float32, device=CPU)
    assert len(decoder.layers) == 3


def test_a_head_may_have_a_folder_of_its_own(tmp_path: Path) -> None:
    mtp = TinyMtp("mimo")
    target, own = write_mtp(tmp_path / "target", mtp), tmp_path / "own"
    shutil.copytree(target, own)
    removed: dict[str, Tensor | None] = {
        key: None for key in MtpOracle(mtp, target).tensors if "mtp_layers" not in key
    }
    change_mtp(own, tensors=removed)
    write_checkpoint(tmp_path / "plain", shape=TinyShape(vocab_size=64, num_layers=5))
    head = _load(own, tmp_path / "plain")
    assert head.feature_spec.layer_indices == (6,)


KEY = "model.layers.3."


@pytest.mark.parametrize(
    ("config", "tensors", "parts"),
    [
        ({}, {f"{KEY}enorm.weight": None}, [f"{KEY}enorm.weight"]),
        ({}, {f"{KEY}eh_proj.weight": None}, [f"{KEY}eh_proj.weight"]),
        ({}, {f"{KEY}mlp.up_proj.weight": None}, [f"{KEY}mlp.up_proj.weight"]),
        (
            {},
            {f"{KEY}eh_proj.weight": torch.zeros(32, 32)},
            [f"{KEY}eh_proj.weight", "[32, 32]", "[32, 64]"],
        ),
        ({}, {f"{KEY}self_attn.q_proj.bias": torch.zeros(32)}, [f"{KEY}self_attn.q_proj.bias"]),
        ({"num_nextn_predict_layers": 2}, {}, ["num_nextn_predict_layers is 2", "have 1"]),
        ({"hidden_size": 16}, {}, ["hidden_size is 16", "target's is 32"]),
        ({"vocab_size": 65}, {}, ["vocab_size is 65", "target's is 64"]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_key_and_shapes(
    config: dict[str, Any], tensors: dict[str, Tensor | None], parts: list[str], tmp_path: Path
) -> None:
    target = write_mtp(tmp_path / "target", TinyMtp())
    folder = write_mtp(tmp_path / "head", TinyMtp())
    change_mtp(folder, config=config, tensors=tensors)
    with pytest.raises(CheckpointError) as caught:
        _load(folder, target)
    assert all(part in caught.value.message for part in parts), caught.value.message


def test_a_folder_without_such_layers_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shape=TinyShape(vocab_size=64))
    with pytest.raises(CheckpointError, match="no next-token layers"):
        _load(folder)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    target = write_mtp(tmp_path / "target", TinyMtp())
    path = write_mtp(tmp_path / "head", TinyMtp()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        _load(path.parent, target)
