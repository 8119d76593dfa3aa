"""What a model, its device and its settings cannot do together is refused by name."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.target import engine_factory
from services.target.engine_factory import build_runner
from services.target.settings import DraftNeeds, TargetSettings
from shared.errors import SettingsError
from shared.layers.tensor_group import TensorGroup
from shared.model_options import KvDtype, Quantisation
from shared.models.decoder import Decoder
from shared.runtime.memory import Shortage
from tests.helpers.checkpoints import TinyShape, write_checkpoint

POSITIONS = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(max_position_embeddings=POSITIONS)
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", shape=shape)


def _settings(folder: Path, **changes: object) -> TargetSettings:
    return TargetSettings(
        model_path=folder,
        device="cpu",
        max_total_tokens=256,
        **changes,  # type: ignore[arg-type]
    )


def _run_out(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
        "of which 512.00 MiB is free."
    )


def test_only_8_bit_layers_are_said_to_save_memory(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    build_runner(_settings(folder))
    assert "on cpu; keys and values in" in caplog.text
    build_runner(_settings(folder, quantization=Quantisation.INT8))
    assert "on cpu, 8-bit layers save" in caplog.text


def test_context_is_the_models_or_shorter(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert build_runner(_settings(folder)).max_context_tokens == POSITIONS
    assert build_runner(_settings(folder, context_length=64)).max_context_tokens == 64
    assert "context-length" not in caplog.text
    assert build_runner(_settings(folder, context_length=129)).max_context_tokens == POSITIONS
    assert "--context-length is 129; the model has 128 positions" in caplog.text


def test_weights_that_do_not_fit_are_refused_by_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_factory, "load_decoder", _run_out)
    message = (
        r"the weights of tiny, \S+ KiB of files, do not fit cpu: 2.00 GiB more wanted, "
        r"512.00 MiB free; .* more GPUs than --tp-size 1"
    )
    with pytest.raises(SettingsError, match=message):
        build_runner(_settings(folder))


def test_a_cache_that_does_not_fit_is_refused_with_the_setting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_factory, "KvPool", _run_out)
    monkeypatch.setattr(engine_factory, "free_memory_bytes", lambda device: 8 * 2**30)
    settings = TargetSettings(model_path=folder, device="cpu", mem_fraction_static=0.5)
    with pytest.raises(SettingsError, match=r"no memory for the KV cache: 2\.00 GiB more wanted"):
        build_runner(settings)


def test_features_of_embedded_and_remote_drafts_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a share that holds 20 pages, features of 32 numbers a token take a fifth."""
    page_bytes = build_runner(_settings(folder)).runner.pool.layout.page_size_bytes
    monkeypatch.setattr(engine_factory, "free_memory_bytes", lambda device: 40 * page_bytes)
    settings = TargetSettings(model_path=folder, device="cpu", mem_fraction_static=0.5)
    num_pages = [
        build_runner(own, draft=DraftNeeds(layers)).runner.pool.num_pages
        for own, layers in (
            (settings, ()),
            (settings, (1,)),
            (replace(settings, remote_draft_features=2), ()),
            (replace(settings, remote_draft_features=2), (1,)),
        )
    ]
    feature_bytes = settings.page_size * 32 * 4
    expected = [20 * page_bytes // (page_bytes + count * feature_bytes) for count in range(4)]
    assert num_pages == expected
    assert len(set(num_pages)) == 4


def test_the_cache_leaves_room_for_the_weights_of_a_draft(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = build_runner(_settings(folder)).runner.pool.layout.page_size_bytes
    monkeypatch.setattr(engine_factory, "free_memory_bytes", lambda device: 40 * page_bytes)
    settings = TargetSettings(model_path=folder, device="cpu", mem_fraction_static=0.5)
    draft = DraftNeeds(weight_bytes=10 * page_bytes)
    assert build_runner(settings, draft=draft).runner.pool.num_pages == 15


def test_advice_names_the_share_that_a_default_leaves_beside_a_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of 50 of 100 pages, where a step takes the other 50, has no share of 0.85."""
    decoder = build_runner(_settings(folder)).runner.decoder
    page_bytes = decoder.kv_layout(16).page_size_bytes
    monkeypatch.setattr(Decoder, "device", torch.device("cuda"))
    monkeypatch.setattr(engine_factory, "free_memory_bytes", lambda device: 110 * page_bytes)
    monkeypatch.setattr(engine_factory, "step_memory_bytes", lambda decoder: 50 * page_bytes)
    monkeypatch.setattr(engine_factory, "KvPool", lambda *_, **__: None)
    settings = TargetSettings(model_path=folder, device="cuda")
    _, cache = engine_factory._pool(settings, decoder, 16, 10 * page_bytes, 0)
    assert cache.size_bytes == 50 * page_bytes
    advice = cache.advice(Shortage(10 * page_bytes, 0))
    assert "lower --mem-fraction-static from 0.5 to 0.4 or less" in advice


def test_a_small_model_leaves_memory_for_a_draft_that_attaches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond 16 times what the running requests can use, pages only take memory from others."""
    decoder = build_runner(_settings(folder)).runner.decoder
    page_bytes = decoder.kv_layout(16).page_size_bytes
    monkeypatch.setattr(engine_factory, "free_memory_bytes", lambda device: 1000 * page_bytes)
    monkeypatch.setattr(engine_factory, "step_memory_bytes", lambda decoder: 0)
    settings = TargetSettings(model_path=folder, device="cpu", max_running_requests=1)
    pool, _ = engine_factory._pool(settings, decoder, 16, 0, 0)
    assert pool.num_pages == 1 + 16
    settings = replace(settings, mem_fraction_static=0.5)
    pool, _ = engine_factory._pool(settings, decoder, 16, 0, 0)
    assert pool.num_pages > 1 + 16


def test_features_are_counted_for_the_pages_of_all_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a cache of its own, and the first one the features of all."""
    decoder = build_runner(_settings(folder)).runner.decoder
    group = TensorGroup(
        1, 2, lambda gathered, part: gathered.copy_(part.repeat(2)), spreads_sequences=True
    )
    page_bytes = decoder.kv_layout(16).page_size_bytes
    monkeypatch.setattr(engine_factory, "free_memory_bytes", lambda device: 40 * page_bytes)
    settings = TargetSettings(model_path=folder, device="cpu", mem_fraction_static=0.5)
    pool, _ = engine_factory._pool(settings, replace(decoder, group=group), 16, 0, 32 * 4)
    assert pool.num_pages == 20 * page_bytes // (page_bytes + 2 * 16 * 32 * 4)
    assert pool.num_leased_pages == 2 * pool.num_pages


def test_older_gpus_are_refused_what_they_cannot_compute(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    device = torch.device("cuda", 0)
    engine_factory._check_device(_settings(folder), device)
    asked = _settings(
        folder,
        quantization=Quantisation.FP8,
        kv_cache_dtype=KvDtype.FP8_E4M3,
        enable_deterministic_inference=True,
    )
    with pytest.raises(SettingsError) as raised:
        engine_factory._check_device(asked, device)
    assert [line.split(" needs")[0] for line in raised.value.message.splitlines()] == [
        "--quantization fp8",
        "--kv-cache-dtype fp8_e4m3",
        "--enable-deterministic-inference",
    ]


def test_products_whose_bits_depend_on_the_batch_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(folder, enable_deterministic_inference=True)
    decoder = build_runner(settings).runner.decoder
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        engine_factory._warn_of_batch_variant_products(settings, decoder)
        assert not caplog.text, "on a CPU no row depends on its batch"
        monkeypatch.setattr(type(decoder), "device", torch.device("cuda"))
        engine_factory._warn_of_batch_variant_products(settings, decoder)
    num_products = len(decoder.layers) * 4 + 1
    assert f"{num_products} of {num_products} products keep the library's kernels" in caplog.text
