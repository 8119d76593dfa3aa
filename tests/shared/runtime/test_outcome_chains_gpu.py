"""Chains for likely verdicts by Triton's kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.runtime.round_fused import FusedDecoderDraft
from shared.runtime.round_state import RoundSampling
from tests.helpers.engines import tiny_decoder
from tests.helpers.kernel_device import kernel_device
from tests.helpers.outcome_cases import OutcomeCase, check_chains

pytestmark = pytest.mark.gpu


def test_each_chain_follows_its_verdict(tmp_path: Path) -> None:
    case = OutcomeCase(tiny_decoder(tmp_path, kernel_device()))
    assert isinstance(case.code, FusedDecoderDraft)
    with torch.inference_mode():
        case.chains.prepare(case.code, case.state, RoundSampling.DRAWN)
        check_chains(case)
