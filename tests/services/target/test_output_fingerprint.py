"""Other weights or settings of numbers give another fingerprint; how many run at once does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from services.target.process import output_fingerprint
from services.target.settings import TargetSettings


def test_weights_and_settings_count(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3_000_000))
    settings = TargetSettings(model_path=tmp_path, device="cpu")
    first = output_fingerprint(settings)
    assert output_fingerprint(replace(settings, max_running_requests=3)) == first
    assert output_fingerprint(replace(settings, page_size=32)) == first
    assert output_fingerprint(replace(settings, context_length=77)) != first
    weights.write_bytes(bytes(2_999_999) + b"1")
    assert output_fingerprint(settings) == first  # among bytes that nobody looks at
    weights.write_bytes(b"1" + bytes(2_999_999))
    assert output_fingerprint(settings) != first
    (tmp_path / "config.json").write_text("{}")
    assert len({output_fingerprint(settings), first}) == 2
