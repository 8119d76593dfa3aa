"""SGLang's kits of server tests."""

from __future__ import annotations

import ast
import os
import unittest
from pathlib import Path
from typing import Any

import pytest
import requests
from transformers import AutoTokenizer

from suites.suite import Selection, StandIns, Suite

KITS = (
    *("abort_timeout_kit", "anthropic_messages_kit", "basic_api_contract_kit"),
    *("basic_decode_correctness_kit", "basic_scheduler_stress_kit", "cache_hit_kit"),
    *("ebnf_constrained_kit", "json_constrained_kit", "json_mode_kit", "matched_stop_kit"),
    *("pause_generation_kit", "radix_cache_server_kit", "reasoning_kit"),
    *("regex_constrained_kit", "spec_server_kits", "streaming_session_kit"),
)
"""Without those that fetch data sets (eval_accuracy, kl_divergence, lm_eval, mmmu_vlm, perf_bench),
show media (vlm_perf), start servers of their own (pd_parity), ask for more context or vocabulary
than the demo's (spec_decoding, unified_radix_cache), test kernels (attention_unittest,
dsa_metadata), or the cache of another kind of model (prefix_cache_branching) or its scheduler
(fwd_occupancy)."""
_MODEL = "the words, their end, the thoughts, the context or the vocabulary of its model"
_OWN = "its server's own classes and settings"
_SESSIONS = "sessions that a server keeps between requests; session_params is refused"
_REFUSED = "hidden states, sampling masks; both fields are refused"
_DATA = "a data set of questions, from the network"
SUITE = Suite(
    requirement="sglang==0.5.23",
    part="sglang/test/",
    root="sglang",
    files=(str(Path(__file__).with_name("sglang_kits.py")),),
    is_wheel=True,
    not_applicable={
        "WaitingTimeoutMixin*": _OWN,
        "StreamingSessionKitMixin*": _SESSIONS,
        "AbortLeakReproKitMixin*": _SESSIONS,
        "SpecHiddenStatesKit*": _REFUSED,
        "SpecSamplingMaskKit*": _REFUSED,
        "SpecAccuracyKit*": _DATA,
        "SpecPerfKit*": _DATA,
        "test_tool_result_image_content_conversion": _OWN,
        "test_reasoning_tokens_generate_exact_count": _OWN,
        "SpecFeatureKit*test_radix_attention": _MODEL,
        "SpecGrammarKit*": _MODEL,
        "test_basic_math": _MODEL,
        "test_capital_france": _MODEL,
        "test_concurrent_requests": _MODEL,
        "test_long_prompt": _MODEL,
        "BasicSchedulerStress*test_streaming_response": _MODEL,
        "test_ebnf_generate_complex_json": _MODEL,
        "test_ebnf_generate_custom_log_format": _MODEL,
        "test_regex_generate_complex_json": _MODEL,
        "TestJSONModeMixin*": _MODEL,
        "test_finish_stop_eos": _MODEL,
        "test_finish_stop_regex_str": _MODEL,
        "test_finish_stop_str": _MODEL,
        "test_reasoning_tokens_thinking*": _MODEL,
        "TestSeparateReasoningMixin*": _MODEL,
    },
)


FIXTURE = "sglang.test.server_fixtures.spec_eagle_fixture"


def _tokenizer(*_: object) -> Any:
    return AutoTokenizer.from_pretrained(os.environ["OUTRIDER_TOKENIZER"])


def _function(file: Path, name: str) -> Any:
    """Returns a function of a module that cannot be imported without its server."""
    module = ast.parse(file.read_text())
    module.body = [each for each in module.body if isinstance(each, ast.FunctionDef)]
    module.body = [each for each in module.body if each.name == name]
    found: dict[str, Any] = {"requests": requests, "unittest": unittest, "Tuple": tuple}
    exec(compile(module, file, "exec"), found)
    return found[name]


def pytest_configure(config: pytest.Config) -> None:
    kits = Path("test/kits").resolve()

    def real(name: str) -> str | None:
        file = kits / f"{name.rpartition('.')[2]}.py"
        if name == FIXTURE:
            return str(kits.parent / "server_fixtures" / "spec_eagle_fixture.py")
        return str(file) if name.startswith("sglang.test.kits.") and file.exists() else None

    filled: dict[str, dict[str, Any]] = {
        "sglang.srt.utils.hf_transformers_utils": {"get_tokenizer": _tokenizer},
        "sglang.test.test_utils": {
            "CustomTestCase": unittest.TestCase,
            "run_logprob_check": _function(kits.parent / "test_utils.py", "run_logprob_check"),
        },
    }
    StandIns(("sglang", "tabulate", "torch", "yaml"), filled, real)
    config.pluginmanager.register(Selection(SUITE))
