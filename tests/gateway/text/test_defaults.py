"""`generation_config.json` gives the defaults of requests that say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.generation import TargetModel
from gateway.sampling import sampling_params
from gateway.schema import CompletionRequest
from shared.errors import CheckpointError
from shared.sampling_defaults import SamplingDefaults
from shared.text.tokenizer import Tokenizer

MODEL = TargetModel("m", "0", 100, 50, frozenset({0}))


def read(folder: Path, config: object) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return SamplingDefaults.read(folder)


def test_a_request_says_more_than_the_model_and_the_model_more_than_openai(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    defaults = read(tmp_path, {"temperature": 0.6, "top_k": 20, "do_sample": False, "x": 1})
    body = CompletionRequest.model_validate({"prompt": "x", "top_k": 5})
    sampling = sampling_params(body, defaults, MODEL, tokenizer)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 5, 1.0)


def test_without_the_file_the_defaults_are_openais(tmp_path: Path) -> None:
    assert SamplingDefaults.read(tmp_path) == SamplingDefaults()
    assert SamplingDefaults().temperature == 1.0


@pytest.mark.parametrize("config", [{"temperature": 9}, [], {"top_p": "x"}])
def test_defaults_out_of_range_stop_the_start(tmp_path: Path, config: object) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read(tmp_path, config)


def test_minus_one_switches_top_k_off(tokenizer: Tokenizer) -> None:
    body = CompletionRequest.model_validate({"prompt": "x", "top_k": -1})
    assert sampling_params(body, SamplingDefaults(top_k=7), MODEL, tokenizer).top_k == 0
