"""DFlash heads of real key names against a plainly written oracle, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.errors import CheckpointError
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.heads.dflash import DflashHead, load_dflash
from shared.models.heads.target_tensors import TargetFolder
from tests.helpers.checkpoints import TinyShape, build_model, write_checkpoint
from tests.helpers.dflash_heads import (
    DflashOracle,
    TinyDflash,
    dflash_config,
    dflash_tensors,
    write_dflash,
)
from tests.helpers.pooled_heads import BlockRunner

CPU = torch.device("cpu")
PAGE_SIZE = 4
TARGET_SHAPE = TinyShape(vocab_size=64, num_layers=6)
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 60]
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFolder:
    folder = write_checkpoint(tmp_path_factory.mktemp("target"), shape=TARGET_SHAPE)
    return TargetFolder(folder, dtype=torch.float32, device=CPU)


def _load(folder: Path, head: TinyDflash, target: TargetFolder) -> DflashHead:
    write_dflash(folder, head)
    return load_dflash(folder, target, dtype=torch.float32, device=CPU)


def _oracle(head: TinyDflash) -> DflashOracle:
    weights = build_model("llama", TARGET_SHAPE).state_dict()
    return DflashOracle(
        head,
        target_embedding=weights["model.embed_tokens.weight"],
        target_lm_head=weights["lm_head.weight"],
    )


def _features(num_rows: int, width: int = 96) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0))


def _block_logits(
    head: DflashHead, tokens: list[int], features: Tensor, cuts: tuple[int, ...]
) -> Tensor:
    runner = BlockRunner(head, KvPool(head.kv_layout(PAGE_SIZE), 8, CPU))
    assert head.feature_spec.projection is not None
    rows, first = features @ head.feature_spec.projection.T, 0
    for count in cuts:
        positions = range(first, first + count)
        slots = [PAGE_SIZE + position for position in positions]
        runner.write_context(rows[first : first + count], positions, slots)
        first += count
    size = head.config.block_size
    block = SequenceRows(
        token_ids=[tokens[-1], *[head.config.mask_token_id] * (size - 1)],
        positions=range(first, first + size),
        kv_start=first,
        pages=range(1, 8),
        prefix_length=first,
        tail_mask=[[True] * size] * size,
        logit_rows=range(1, size),
    )
    return runner.run(build_batch([block], page_size=PAGE_SIZE, device=CPU))


@pytest.mark.parametrize("cuts", [(10,), (1,) * 10, (3, 4, 3)], ids=str)
@pytest.mark.parametrize(
    "tiny",
    [
        TinyDflash(),
        TinyDflash(num_layers=1, block_size=2),
        TinyDflash(num_kv_heads=4, block_size=9, mask_token_id=0),
        TinyDflash(num_features=2, target_layer_ids=(0, 5)),
    ],
    ids=["plain", "smallest", "block of 9", "2 features"],
)
def test_a_block_scores_as_the_oracle_says(
    tiny: TinyDflash, cuts: tuple[int, ...], tmp_path: Path, target: TargetFolder
) -> None:
    head = _load(tmp_path, tiny, target)
    features = _features(len(TOKENS) - 1, 32 * tiny.num_features)
    actual = _block_logits(head, TOKENS, features, cuts)
    expected = _oracle(tiny).block_logits(TOKENS, features)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_layers_are_named_by_their_outputs(tmp_path: Path, target: TargetFolder) -> None:
    head = _load(tmp_path, TinyDflash(target_layer_ids=(1, 3, 4)), target)
    assert head.feature_spec.layer_indices == (2, 4, 5)
    assert head.feature_spec.width == 32


def test_the_output_of_the_last_layer_is_behind_the_final_norm(
    tmp_path: Path, target: TargetFolder
) -> None:
    head = _load(tmp_path, TinyDflash(target_layer_ids=(1, 3, 5)), target)
    assert head.feature_spec.layer_indices == (2, 4, 7)


@pytest.mark.parametrize(("num_layers", "layers"), [(1, (4,)), (2, (2, 4)), (3, (2, 3, 4))])
def test_layers_are_spread_when_none_are_named(
    num_layers: int, layers: tuple[int, ...], tmp_path: Path, target: TargetFolder
) -> None:
    tiny = TinyDflash(num_layers=num_layers, num_features=num_layers, target_layer_ids=None)
    assert _load(tmp_path, tiny, target).feature_spec.layer_indices == layers


def test_a_block_is_16_rows_when_the_config_does_not_say(
    tmp_path: Path, target: TargetFolder
) -> None:
    head = _load(tmp_path, TinyDflash(config={"block_size": None}), target)
    assert head.config.block_size == 16


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda c, t: t.pop("fc.weight"), ["fc.weight"]),
        (lambda c, t: t.pop("hidden_norm.weight"), ["hidden_norm.weight"]),
        (lambda c, t: t.pop("layers.1.self_attn.k_norm.weight"), ["layers.1.self_attn.k_norm"]),
        (lambda c, t: c.update(num_hidden_layers=3), ["layers.2."]),
        (lambda c, t: c.update(num_hidden_layers=1), ["does not use", "layers.1."]),
        (lambda c, t: c.update(num_target_layers=8), ["num_target_layers is 8", "target's is 6"]),
        (lambda c, t: c.update(hidden_size=16), ["hidden_size is 16", "target's is 32"]),
        (lambda c, t: c.update(head_dim=16), ["q_proj.weight", "[32, 32]", "[64, 32]"]),
        (
            lambda c, t: c["dflash_config"].update(target_layer_ids=[1, 3]),
            ["fc.weight", "[32, 96]", "[32, 64]"],
        ),
        (
            lambda c, t: c["dflash_config"].update(target_layer_ids=[1, 3, 6]),
            ["target_layer_ids is [1, 3, 6]", "[0, 6)"],
        ),
        (lambda c, t: c["dflash_config"].pop("mask_token_id"), ["no dflash_config.mask_token_id"]),
        (
            lambda c, t: c["dflash_config"].update(mask_token_id=64),
            ["mask_token_id is 64", "[0, 64)"],
        ),
        (lambda c, t: c.update(block_size=1), ["block_size is 1", "[2, 33]"]),
        (lambda c, t: c.update(block_size=34), ["block_size is 34", "[2, 33]"]),
        (
            lambda c, t: c.update(layer_types=["sliding_attention", "full_attention"]),
            ["layer_types", "sliding_attention"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_key_and_shapes(
    change: Change, parts: list[str], tmp_path: Path, target: TargetFolder
) -> None:
    config, tensors = dflash_config(TinyDflash()), dflash_tensors(TinyDflash())
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_dflash(tmp_path, target, dtype=torch.float32, device=CPU)
    assert all(part in caught.value.message for part in parts), caught.value.message


def test_a_truncated_file_is_refused_by_name(tmp_path: Path, target: TargetFolder) -> None:
    path = write_dflash(tmp_path, TinyDflash()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_dflash(tmp_path, target, dtype=torch.float32, device=CPU)
