"""Drafters built from settings: which one, how long it looks back, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.draft.drafter_factory import build_drafter, feature_layers
from services.draft.drafters import model_factory
from services.draft.drafters.dflash import DflashDrafter
from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.model_factory import Host
from services.draft.drafters.multi_layer import MultiLayerDrafter
from services.draft.settings import DraftSettings
from shared.errors import CheckpointError, SettingsError
from shared.models.heads.feature_spec import FeatureSpec
from shared.models.loader import load_decoder
from shared.settings import load_settings
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.dflash_heads import TinyDflash, write_dflash
from tests.helpers.draft_heads import TinyHead, write_head
from tests.helpers.mtp_heads import TinyMtp, write_mtp

SHAPE = TinyShape(vocab_size=64, num_layers=6, max_position_embeddings=256)


def _settings(algorithm: str, target: Path, *arguments: str) -> DraftSettings:
    flags = (
        *("--speculative-algorithm", algorithm, "--target-model-path", str(target)),
        *("--device", "cpu", "--max-total-tokens", "1024", *arguments),
    )
    return load_settings(DraftSettings, service="draft", arguments=flags, env={})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), shape=SHAPE)


@pytest.mark.parametrize(
    ("mtp", "kind"),
    [
        (TinyMtp(shape=SHAPE), EagleDrafter),
        (TinyMtp("mimo", shape=SHAPE), EagleDrafter),
        (TinyMtp(num_layers=3, shape=SHAPE), MultiLayerDrafter),
    ],
    ids=["deepseek", "mimo", "3 layers"],
)
def test_next_token_layers_come_from_the_target_s_own_folder(
    mtp: TinyMtp, kind: type[EagleDrafter], tmp_path: Path
) -> None:
    settings = _settings("MTP", write_mtp(tmp_path, mtp))
    drafter = build_drafter(settings)
    assert type(drafter) is kind
    assert drafter.limits.max_context_tokens == 256
    spec = drafter.limits.feature_spec
    assert spec is not None
    assert spec.layer_indices == feature_layers(settings) == (7,)


def test_a_target_without_next_token_layers_is_refused(target: Path) -> None:
    with pytest.raises(CheckpointError, match="no next-token layers"):
        build_drafter(_settings("MTP", target))


@pytest.mark.parametrize("quantisation", ["unquant", "int8"])
def test_a_block_head_is_built_with_its_target_s_tensors(
    quantisation: str, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = write_dflash(tmp_path, TinyDflash())
    flags = ["--speculative-draft-model-path", str(head)]
    flags += ["--speculative-draft-model-quantization", quantisation]
    with caplog.at_level(logging.WARNING):
        settings = _settings("DFLASH", target, *flags)
        drafter = build_drafter(settings)
    assert isinstance(drafter, DflashDrafter)
    spec = drafter.limits.feature_spec
    assert spec is not None
    assert spec.layer_indices == feature_layers(settings)
    # The head was trained on 128 tokens, the target on 256.
    assert drafter.limits.max_context_tokens == 128
    assert "looks back on 123 tokens; the target's context is 256" in caplog.text


def test_a_window_confines_what_a_block_sees(target: Path, tmp_path: Path) -> None:
    flags = ["--speculative-draft-model-path", str(write_dflash(tmp_path, TinyDflash()))]
    flags += ("--speculative-draft-window-size", "64")
    drafter = build_drafter(_settings("DFLASH", target, *flags))
    assert drafter.limits.max_context_tokens == 64 + 5


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ("--speculative-num-steps", "5", "--speculative-eagle-topk", "2"),
            "--speculative-num-steps is 5; a block of 5 rows drafts 4 tokens",
        ),
        (
            ("--speculative-num-steps", "4", "--speculative-eagle-topk", "1"),
            "--speculative-num-draft-tokens is 9; a chain over a block has 5 rows",
        ),
    ],
)
def test_a_shape_that_no_block_fills_is_refused(
    arguments: tuple[str, ...], part: str, target: Path, tmp_path: Path
) -> None:
    flags = ["--speculative-draft-model-path", str(write_dflash(tmp_path, TinyDflash()))]
    flags += (*arguments, "--speculative-num-draft-tokens", "9")
    with pytest.raises(SettingsError) as caught:
        build_drafter(_settings("DFLASH", target, *flags))
    assert part in caught.value.message


def test_a_pool_without_room_to_look_back_is_refused(target: Path, tmp_path: Path) -> None:
    flags = ["--speculative-draft-model-path", str(write_dflash(tmp_path, TinyDflash()))]
    flags += ("--max-total-tokens", "64", "--page-size", "64")
    with pytest.raises(SettingsError, match="--max-total-tokens gives 64 tokens"):
        build_drafter(_settings("DFLASH", target, *flags))


@pytest.mark.parametrize("algorithm", ["EAGLE", "DFLASH"])
def test_a_target_of_this_process_lends_what_its_folder_is_not_read_for(
    algorithm: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "target", shape=SHAPE)
    decoder = load_decoder(folder, dtype=torch.float32, device=torch.device("cpu"))
    (folder / "model.safetensors").unlink()
    if algorithm == "EAGLE":
        head = write_head(tmp_path / "head", TinyHead(vocab_size=64, has_embedding=False))
    else:
        head = write_dflash(tmp_path / "head", TinyDflash())
    settings = _settings(algorithm, folder, "--speculative-draft-model-path", str(head))
    assert build_drafter(settings, Host(decoder)).limits.feature_spec is not None
    with pytest.raises(CheckpointError, match="has neither model"):
        build_drafter(settings)


@pytest.mark.parametrize("algorithm", ["EAGLE", "MTP", "DFLASH"])
def test_a_head_in_its_target_s_process_takes_no_more_than_it_can_use(
    algorithm: str, target: Path, tmp_path: Path
) -> None:
    if algorithm == "MTP":
        head = target = write_mtp(tmp_path, TinyMtp(shape=SHAPE))
    elif algorithm == "EAGLE":
        head = write_head(tmp_path, TinyHead(vocab_size=64, has_embedding=False))
    else:
        head = write_dflash(tmp_path, TinyDflash())
    settings = _settings(algorithm, target, "--speculative-draft-model-path", str(head))
    settings = replace(settings, max_total_tokens=None, page_size=16)
    drafter = build_drafter(settings, Host(num_tokens=480))
    # Its own sequences, and rounds on the device.
    assert drafter.gauges()["free_page_count"] == 2 * 480 / 16


def test_a_cache_leaves_room_for_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_factory, "free_memory_bytes", lambda _: 1000)
    spec, cpu = FeatureSpec((1,), torch.float32, 5, None), torch.device("cpu")
    where = Host(num_tokens=20, round_bytes=200)
    assert where.reserved_bytes(cpu, 100) == 100 + 200
    assert where.reserved_bytes(cpu, 100, spec) == 100 + 20 * 5 * 4 + 200
    # Where that is not there, half of what is left.
    assert where.reserved_bytes(cpu, 300, spec) == 300 + 400 + 150
    assert Host(num_tokens=20).reserved_bytes(cpu, 100, spec) == 100 + 400
