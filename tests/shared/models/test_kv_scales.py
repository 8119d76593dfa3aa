"""Factors of e4m3 caches: no key or value is ever too large for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.model_options import ModelOptions, Quantisation
from shared.models.decoder import Decoder
from shared.models.kv_scales import kv_scales
from shared.models.loader import load_decoder
from shared.runtime.runner import ModelRunner
from tests.helpers.checkpoints import TinyShape, write_checkpoint

CPU = torch.device("cpu")
TOKENS = list(range(40))


def _decoder(
    folder: Path, family: str, quantisation: Quantisation = Quantisation.UNQUANT
) -> Decoder:
    write_checkpoint(folder, family, TinyShape(vocab_size=64))
    options = ModelOptions(quantisation=quantisation)
    return load_decoder(folder, dtype=torch.float32, device=CPU, options=options)


def _runner(decoder: Decoder, kv_dtype: torch.dtype | None = None) -> ModelRunner:
    layout = decoder.kv_layout(8, kv_dtype)
    scales = kv_scales(decoder) if layout.is_e4m3 else None
    return ModelRunner(decoder, KvPool(layout, 7, CPU, scales))


def _logits(runner: ModelRunner) -> torch.Tensor:
    num_rows = len(TOKENS)
    rows = SequenceRows(TOKENS, range(num_rows), 0, (1, 2, 3, 4, 5), 0, None, range(num_rows))
    return runner.run(build_batch([rows], page_size=8, device=CPU)).logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bounds_hold_and_are_not_far_off(family: str, tmp_path: Path) -> None:
    decoder = _decoder(tmp_path, family)
    runner = _runner(decoder)
    _logits(runner)
    scales = kv_scales(decoder)
    caches = torch.stack([torch.stack(runner.pool.keys), torch.stack(runner.pool.values)])
    largest = caches.abs().amax(dim=(2, 4)) / scales
    assert float(largest.max()) <= 448.0
    assert float(largest.min()) > 8.0, "a factor too large would waste e4m3's range"
    assert torch.equal(scales.log2(), scales.log2().round()), "powers of two"


@pytest.mark.parametrize("quantisation", [Quantisation.UNQUANT, Quantisation.FP8])
def test_logits_of_an_e4m3_cache_stay_close(quantisation: Quantisation, tmp_path: Path) -> None:
    decoder = _decoder(tmp_path, "llama", quantisation)
    exact = _logits(_runner(decoder))
    error = (_logits(_runner(decoder, torch.float8_e4m3fn)) - exact).norm() / exact.norm()
    assert 1e-4 < float(error) < 0.3


def test_a_pool_has_scales_exactly_when_it_is_e4m3(tmp_path: Path) -> None:
    decoder = _decoder(tmp_path, "llama")
    with pytest.raises(AssertionError, match="has scales"):
        KvPool(decoder.kv_layout(8, torch.float8_e4m3fn), 4, CPU)
    with pytest.raises(AssertionError, match="has scales"):
        KvPool(decoder.kv_layout(8), 4, CPU, kv_scales(decoder))
