"""Settings of MTP and DFLASH: defaults that depend on checkpoints, and combinations refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.draft.algorithm import Algorithm
from services.draft.settings import DraftSettings
from shared.errors import CheckpointError, SettingsError
from shared.settings import load_settings
from shared.tokens import TreeShape

STEPS, TOPK, TOKENS = (
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
)
BLOCK = "--speculative-dflash-block-size"


def _read(algorithm: str, *arguments: str) -> DraftSettings:
    flags = ("--speculative-algorithm", algorithm, *arguments)
    return load_settings(DraftSettings, service="draft", arguments=flags, env={})


def _folder(folder: Path, **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("MiMoForCausalLM", TreeShape(1, 1, 2)),
        ("LlamaForCausalLM", TreeShape(5, 4, 8)),
        ("Qwen3ForCausalLM", TreeShape(3, 1, 4)),
    ],
)
def test_next_token_layers_of_mimo_draft_one_token(
    architecture: str, shape: TreeShape, tmp_path: Path
) -> None:
    target = _folder(tmp_path, architectures=[architecture])
    settings = _read("MTP", "--target-model-path", target)
    assert settings.shape == shape
    given = _read("MTP", "--target-model-path", target, STEPS, "2", TOPK, "3", TOKENS, "7")
    assert given.shape == TreeShape(2, 3, 7)


def test_next_token_layers_are_looked_for_in_the_target_s_folder(tmp_path: Path) -> None:
    settings = _read("MTP", "--target-model-path", str(tmp_path))
    assert settings.model_folder == tmp_path
    own = _read(
        "MTP", "--target-model-path", str(tmp_path), "--speculative-draft-model-path", "/own"
    )
    assert own.model_folder == Path("/own")
    assert _read("MTP").model_folder.name == "mtp"
    assert _read("MTP").target_folder.name == "target"


@pytest.mark.parametrize(
    ("config", "size"),
    [({"block_size": 8}, 8), ({"dflash_config": {"block_size": 10}}, 10), ({}, 16)],
    ids=str,
)
def test_a_block_is_as_long_as_the_checkpoint_says(
    config: dict[str, Any], size: int, tmp_path: Path
) -> None:
    flags = ("--speculative-draft-model-path", _folder(tmp_path, **config))
    assert _read("DFLASH", *flags).shape == TreeShape(size - 1, 1, size)
    assert _read("DFLASH", *flags, BLOCK, "4").shape == TreeShape(3, 1, 4)
    assert _read("DFLASH", *flags, STEPS, "3", TOPK, "4", TOKENS, "30").shape == TreeShape(3, 4, 30)


def test_a_block_longer_than_trees_are_deep_is_refused(tmp_path: Path) -> None:
    settings = _read("DFLASH", "--speculative-draft-model-path", _folder(tmp_path, block_size=64))
    with pytest.raises(CheckpointError, match=r"block_size is 64; it must be in \[2, 33\]"):
        _ = settings.shape


@pytest.mark.parametrize("algorithm", [Algorithm.MTP, Algorithm.DFLASH])
def test_both_read_features(algorithm: Algorithm) -> None:
    assert algorithm.reads_features
    assert algorithm.has_model


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("MTP", "--speculative-token-map", "x"), "--speculative-token-map: MTP has no head"),
        (("DFLASH", "--speculative-token-map", "x"), "--speculative-token-map: DFLASH has no head"),
        (("MTP", BLOCK, "8"), f"{BLOCK}: MTP drafts no blocks; DFLASH does"),
        (("STANDALONE", BLOCK, "8"), f"{BLOCK}: STANDALONE drafts no blocks"),
        (("EAGLE", BLOCK, "8"), f"{BLOCK}: EAGLE drafts no blocks"),
        (("DFLASH", BLOCK, "1"), "dflash-block-size"),
        (("DFLASH", BLOCK, "34"), "dflash-block-size"),
        (
            ("DFLASH", BLOCK, "8", STEPS, "8", TOPK, "2", TOKENS, "9"),
            f"{STEPS} is 8; a block of 8 rows drafts 7 tokens",
        ),
        (
            ("DFLASH", BLOCK, "8", STEPS, "7", TOPK, "1", TOKENS, "9"),
            f"{TOKENS} is 9; a chain over a block has 8 rows",
        ),
        (("DFLASH", STEPS, "7"), "a tree needs all of"),
    ],
)
def test_wrong_combinations_are_refused_by_name(arguments: tuple[str, ...], part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        _read(*arguments)
    assert part in caught.value.message
