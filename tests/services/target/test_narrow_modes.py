"""The losslessness ladder of targets with weights, keys and values in fewer bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.target.step_report import StepReport
from shared.model_options import ModelOptions, Quantisation
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.tokens import SamplingParams, StopParams, TreeShape
from tests.helpers.ahead_draft import AheadDraft
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.device_rounds import Pair
from tests.helpers.engines import (
    CPU,
    VOCAB_SIZE,
    ScriptedDraft,
    build_engine,
    oracle_trees,
    random_trees,
    request,
    run,
)
from tests.helpers.shared_head_rounds import SilentDraft, sharing_head, write_pair

PROMPTS = ([1, 2, 3, 4, 5], [11], [3] * 12)
MODES = (
    (Quantisation.INT8, None),
    (Quantisation.FP8, None),
    (Quantisation.UNQUANT, torch.float8_e4m3fn),
    (Quantisation.UNQUANT, torch.bfloat16),
    (Quantisation.FP8, torch.float8_e4m3fn),
)
SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(seed=7))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(vocab_size=VOCAB_SIZE)
    return write_checkpoint(tmp_path_factory.mktemp("narrow"), "llama", shape, seed=3)


def _decoder(folder: Path, quantisation: Quantisation) -> Decoder:
    options = ModelOptions(quantisation=quantisation)
    return load_decoder(folder, dtype=torch.float32, device=CPU, options=options)


@pytest.mark.parametrize(
    ("quantisation", "kv_dtype", "sampling"),
    [(*mode, SAMPLINGS[number % 2]) for number, mode in enumerate(MODES)],
)
def test_speculation_changes_nothing(
    folder: Path,
    quantisation: Quantisation,
    kv_dtype: torch.dtype | None,
    sampling: SamplingParams,
) -> None:
    decoder = _decoder(folder, quantisation)
    requests = [request(prompt, sampling) for prompt in PROMPTS]
    plain = run(build_engine(decoder, kv_dtype=kv_dtype), requests)
    expected = [plain.token_ids(key) for key in range(len(PROMPTS))]
    wholes = [[*prompt, *output] for prompt, output in zip(PROMPTS, expected, strict=True)]
    for script in (oracle_trees(wholes, 1, quality=0.6), random_trees(seed=2)):
        engine = build_engine(decoder, kv_dtype=kv_dtype)
        ScriptedDraft(engine, script).attach()
        found = run(engine, requests)
        assert [found.token_ids(key) for key in range(len(PROMPTS))] == expected
        assert found.finished(0).stats.num_verified_rounds > 0


@pytest.mark.parametrize(
    ("quantisation", "kv_dtype", "shares_head"),
    [
        *((*mode, number % 2 == 0) for number, mode in enumerate(MODES)),
        # Narrow keys and values are moved in both ways.
        (*MODES[2], False),
    ],
)
def test_rounds_on_the_device_change_nothing(
    tmp_path: Path, quantisation: Quantisation, kv_dtype: torch.dtype | None, shares_head: bool
) -> None:
    """They move keys and values of accepted nodes by themselves."""
    pair = write_pair(tmp_path / "target", tmp_path / "head", CPU)
    decoder = _decoder(tmp_path / "target", quantisation)
    longer = [request(prompt, SAMPLINGS[1], StopParams(60)) for prompt in PROMPTS]
    plain = run(build_engine(decoder, kv_dtype=kv_dtype), longer)
    reports: list[StepReport] = []
    engine = build_engine(decoder, kv_dtype=kv_dtype, on_step=reports.append, selects=True)
    if shares_head:
        shared = Pair(decoder, pair.head)
        # Pinned, so that no plain steps are chosen where trees took long on a busy machine.
        engine.attach(sharing_head(shared, SilentDraft(), TreeShape(3, 3, 9), {}, is_pinned=True))
    else:
        keys = range(len(PROMPTS))
        AheadDraft(engine, [[*PROMPTS[key], *plain.token_ids(key)] for key in keys]).attach()
    found = run(engine, [request(prompt, SAMPLINGS[1]) for prompt in PROMPTS])
    for key in range(len(PROMPTS)):
        assert found.token_ids(key) == plain.token_ids(key)[:24]
    assert sum(each.num_accepted for each in reports if each.round_shape is not None) > 0


@pytest.mark.parametrize(("quantisation", "kv_dtype"), [MODES[1], MODES[2]])
def test_eight_bits_are_another_model(
    folder: Path, quantisation: Quantisation, kv_dtype: torch.dtype | None
) -> None:
    """The control: modes that did nothing would pass above."""
    asked = [request(prompt, SamplingParams(seed=7)) for prompt in PROMPTS]
    wide = run(build_engine(_decoder(folder, Quantisation.UNQUANT)), asked)
    narrow = run(build_engine(_decoder(folder, quantisation), kv_dtype=kv_dtype), asked)
    keys = range(len(PROMPTS))
    assert any(wide.token_ids(key) != narrow.token_ids(key) for key in keys)
