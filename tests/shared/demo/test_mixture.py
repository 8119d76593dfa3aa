"""The demo's mixture of experts: trained as it is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.demo.recipe import eight_bits, mixture
from shared.demo.recipe.mixture import Mixture, MixtureShape
from shared.demo.recipe.train_mixture import parser, save, train
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from shared.runtime.runner import HeadRunner

CPU = torch.device("cpu")
TINY = MixtureShape(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, dense=48, expert=16)
TOKENS = [3, 14, 150, 9, 26, 5, 35, 8]


def _model() -> Mixture:
    torch.manual_seed(3)
    model = Mixture(TINY)
    for each in model.mixtures():
        each.correction.normal_(std=0.3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(8.0)
            # As it is saved.
            weight.copy_(weight.to(torch.bfloat16))
    return model.eval()


@torch.no_grad()
def test_is_served_as_it_is_trained(tmp_path: Path) -> None:
    model, rows = _model(), SequenceRows.causal(TOKENS, 0, range(1, 4))
    mixture.save(model, tmp_path)
    batch = build_batch([rows], page_size=4, device=CPU)
    decoder = load_decoder(tmp_path, dtype=torch.float32, device=CPU)
    output = decoder.forward(batch, KvPool(decoder.kv_layout(4), 4, CPU))
    states = model.states(torch.tensor([TOKENS]))
    torch.testing.assert_close(output.hidden, states[0], rtol=1e-4, atol=1e-4)
    logits = decoder.logits(output.hidden)
    torch.testing.assert_close(logits, model.logits(states)[0], rtol=1e-4, atol=1e-4)
    tensors = TargetFolder(tmp_path, dtype=torch.float32, device=CPU)
    head = load_mtp(tmp_path, tensors, dtype=torch.float32, device=CPU)
    runner = HeadRunner(head, KvPool(head.kv_layout(4), 4, CPU))
    found = runner.states(batch, states[0], layer=0)
    expected = model.next_states(torch.tensor([TOKENS]), states)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_trains_and_is_written_in_8_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--out", str(tmp_path / "moe"), "--log", str(tmp_path / "log.jsonl"), "--steps", "20"]
    words += ["--seconds", "60", "--conversations", "100", "--batch", "64", "--window", "32"]
    words += ["--hidden", "32", "--layers", "2", "--device", "cpu", "--no-taught"]
    args = parser().parse_args(words)
    save(train(args), args.out)
    assert "bytes" in capsys.readouterr().out
    decoder = load_decoder(args.out, dtype=torch.float32, device=CPU)
    assert decoder.config.experts is not None
    assert "next_token_loss" in args.log.read_text()


def test_fits_the_repository(tmp_path: Path) -> None:
    mixture.save(Mixture(MixtureShape()), tmp_path)
    eight_bits.convert(tmp_path, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 2_500_000
