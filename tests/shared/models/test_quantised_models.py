"""Models with layers in 8 bits: close logits, less memory, embedding and lm_head untouched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kernels.quantised import QuantisedWeight
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.layers.linear import Linear, num_saved_bytes
from shared.model_options import ModelOptions, Quantisation
from shared.models.decoder import Decoder
from shared.models.heads.config import HeadKind
from shared.models.heads.dflash import load_dflash
from shared.models.heads.head import DraftHead
from shared.models.heads.loader import load_head
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from shared.runtime.runner import ModelRunner
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.dflash_heads import TinyDflash, write_dflash
from tests.helpers.draft_heads import TinyHead, write_head
from tests.helpers.mtp_heads import TinyMtp, write_mtp
from tests.helpers.pooled_heads import HeadRunner

CPU = torch.device("cpu")
PAGE_SIZE = 16
TOKENS = list(range(3, 43))
EIGHT_BITS = (Quantisation.INT8, Quantisation.FP8)
# Relative to the norm of the unquantised logits. Six layers of random weights, which cancel
# nothing, add up what each rounds; e4m3 rounds elements to 1 part in 16.
TOLERANCE = {Quantisation.INT8: 0.06, Quantisation.FP8: 0.3}
SHAPE = TinyShape(vocab_size=64, num_layers=6)
EAGLE = TinyHead(has_embedding=False)
EAGLE3 = TinyHead(kind="EAGLE3", draft_vocab_size=20, has_embedding=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), shape=SHAPE)


def _decoder(folder: Path, quantisation: Quantisation) -> Decoder:
    options = ModelOptions(quantisation=quantisation)
    return load_decoder(folder, dtype=torch.float32, device=CPU, options=options)


def _head(folder: Path, head: TinyHead, target: Path, quantisation: Quantisation) -> DraftHead:
    return load_head(
        write_head(folder, head),
        HeadKind(head.kind),
        TargetFolder(target, dtype=torch.float32, device=CPU),
        dtype=torch.float32,
        device=CPU,
        options=ModelOptions(quantisation=quantisation),
    )


def _rows() -> SequenceRows:
    num_rows = len(TOKENS)
    return SequenceRows.causal(TOKENS, 0, (1, 2, 3), range(num_rows))


def _decoder_logits(decoder: Decoder) -> Tensor:
    runner = ModelRunner(decoder, KvPool(decoder.kv_layout(PAGE_SIZE), 4, CPU))
    return runner.run(build_batch([_rows()], page_size=PAGE_SIZE, device=CPU)).logits


def _head_logits(head: DraftHead) -> Tensor:
    runner = HeadRunner(head, KvPool(head.kv_layout(PAGE_SIZE), 4, CPU))
    hidden = torch.randn(len(TOKENS), 32, generator=torch.Generator().manual_seed(4))
    batch = build_batch([_rows()], page_size=PAGE_SIZE, device=CPU)
    logits = runner.logits(runner.states(batch, hidden))
    return logits[:, torch.isfinite(logits[0])]


def _relative_error(logits: Tensor, exact: Tensor) -> float:
    return float((logits - exact).norm() / exact.norm())


@pytest.mark.parametrize("quantisation", EIGHT_BITS)
def test_a_decoders_logits_stay_close(target: Path, quantisation: Quantisation) -> None:
    exact = _decoder_logits(_decoder(target, Quantisation.UNQUANT))
    error = _relative_error(_decoder_logits(_decoder(target, quantisation)), exact)
    assert 0.0 < error < TOLERANCE[quantisation]
    assert _relative_error(exact.roll(1, dims=0), exact) > 0.5, "logits of other rows are far off"


@pytest.mark.parametrize("quantisation", EIGHT_BITS)
def test_experts_are_held_in_8_bits_and_their_logits_stay_close(
    tmp_path: Path, quantisation: Quantisation
) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    shape = TinyShape(vocab_size=64, num_layers=1, overrides=sizes)
    folder = write_checkpoint(tmp_path, "qwen3_moe", shape)
    exact = _decoder_logits(_decoder(folder, Quantisation.UNQUANT))
    decoder = _decoder(folder, quantisation)
    assert 0.0 < _relative_error(_decoder_logits(decoder), exact) < TOLERANCE[quantisation]
    attention, experts = 32 * (64 + 32), 4 * 3 * 24 * 32
    channels = 64 + 32 + 4 * (2 * 24 + 32)
    assert num_saved_bytes(decoder) == 3 * (attention + experts) - 4 * channels


@pytest.mark.parametrize("head", [EAGLE, EAGLE3], ids=["eagle", "eagle3"])
@pytest.mark.parametrize("quantisation", EIGHT_BITS)
def test_a_heads_logits_stay_close(
    head: TinyHead, quantisation: Quantisation, target: Path, tmp_path: Path
) -> None:
    exact = _head_logits(_head(tmp_path, head, target, Quantisation.UNQUANT))
    error = _relative_error(_head_logits(_head(tmp_path, head, target, quantisation)), exact)
    assert 0.0 < error < TOLERANCE[quantisation]


@pytest.mark.parametrize("quantisation", EIGHT_BITS)
def test_memory_shrinks_by_three_bytes_an_element_of_the_layers(
    target: Path, quantisation: Quantisation
) -> None:
    hidden, wide, channels = 32, 48, 64 + 32 + 96 + 32
    elements = hidden * 64 + hidden * 32 + 2 * wide * hidden + hidden * wide
    saved = SHAPE.num_layers * (3 * elements - 4 * channels)
    assert num_saved_bytes(_decoder(target, quantisation)) == saved
    assert num_saved_bytes(_decoder(target, Quantisation.UNQUANT)) == 0


@pytest.mark.parametrize("is_draft", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_drafts_lm_head_is_quantised_a_targets_and_all_embeddings_are_not(
    tmp_path: Path, is_tied: bool, is_draft: bool
) -> None:
    shape = replace(SHAPE, tie_word_embeddings=is_tied)
    folder = write_checkpoint(tmp_path, shape=shape)
    options = ModelOptions(quantisation=Quantisation.INT8, quantises_lm_head=is_draft)
    decoder = load_decoder(folder, dtype=torch.float32, device=CPU, options=options)
    assert decoder.embedding.dtype is torch.float32
    assert isinstance(decoder.lm_head.weight, QuantisedWeight) is is_draft
    plain = load_decoder(folder, dtype=torch.float32, device=CPU)
    close = torch.isclose(decoder.lm_head.dense(), plain.lm_head.dense(), rtol=0.0, atol=5e-3)
    assert close.all()


def test_a_heads_lm_head_is_quantised_unless_it_is_the_targets(
    target: Path, tmp_path: Path
) -> None:
    for head, has_map, expected in (
        (EAGLE3, False, True), (EAGLE, False, False), (EAGLE, True, True)
    ):  # fmt: skip
        loaded = load_head(
            write_head(tmp_path / head.kind, head),
            HeadKind(head.kind),
            TargetFolder(target, dtype=torch.float32, device=CPU),
            dtype=torch.float32,
            device=CPU,
            token_map=torch.arange(5) if has_map else None,
            options=ModelOptions(quantisation=Quantisation.INT8, quantises_lm_head=True),
        )
        assert isinstance(loaded.vocabulary.lm_head.weight, QuantisedWeight) is expected
        assert loaded.embedding.dtype is torch.float32


def _is_quantised(*layers: Linear) -> bool:
    return all(isinstance(layer.weight, QuantisedWeight) for layer in layers)


def test_next_token_layers_are_quantised(tmp_path: Path) -> None:
    folder = write_mtp(tmp_path, TinyMtp(style="mimo", num_layers=2))
    head = load_mtp(
        folder,
        TargetFolder(folder, dtype=torch.float32, device=CPU),
        dtype=torch.float32,
        device=CPU,
        options=ModelOptions(quantisation=Quantisation.FP8),
    )
    for layer in head.layers:
        assert _is_quantised(layer.attention.qkv, layer.attention.output)
    assert num_saved_bytes(head) > 0


def test_block_layers_and_their_context_are_quantised_alike(target: Path, tmp_path: Path) -> None:
    head = load_dflash(
        write_dflash(tmp_path, TinyDflash()),
        TargetFolder(target, dtype=torch.float32, device=CPU),
        dtype=torch.float32,
        device=CPU,
        options=ModelOptions(quantisation=Quantisation.INT8),
    )
    qkv, context = head.layers[0].attention.qkv.weight, head.context.weight
    assert isinstance(qkv, QuantisedWeight)
    assert isinstance(context, QuantisedWeight)
    assert torch.equal(qkv.values[32:], context.values[:32]), "keys and values of the first layer"
