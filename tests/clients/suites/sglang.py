"""SGLang's kits of server tests."""

from __future__ import annotations

import unittest
from pathlib import Path

import pytest

from suites.suite import Selection, StandIns, Suite

KITS = (
    *("abort_timeout_kit", "anthropic_messages_kit", "basic_api_contract_kit"),
    *("basic_decode_correctness_kit", "basic_scheduler_stress_kit", "cache_hit_kit"),
    *("ebnf_constrained_kit", "json_constrained_kit", "json_mode_kit", "matched_stop_kit"),
    *("radix_cache_server_kit", "reasoning_kit", "regex_constrained_kit"),
)
_MODEL = "the words, the thoughts or the context of its model"
_OWN = "its server's own classes and settings"
SUITE = Suite(
    requirement="sglang==0.5.23",
    part="sglang/test/kits/",
    root="sglang",
    files=(str(Path(__file__).with_name("sglang_kits.py")),),
    is_wheel=True,
    not_applicable={
        "WaitingTimeoutMixin*": _OWN,
        "test_tool_result_image_content_conversion": _OWN,
        "test_reasoning_tokens_generate_exact_count": _OWN,
        "test_basic_math": _MODEL,
        "test_capital_france": _MODEL,
        "test_concurrent_requests": _MODEL,
        "test_long_prompt": _MODEL,
        "BasicSchedulerStress*test_streaming_response": _MODEL,
        "test_ebnf_generate_complex_json": _MODEL,
        "test_regex_generate_complex_json": _MODEL,
        "TestJSONModeMixin*": _MODEL,
        "test_finish_stop_eos": _MODEL,
        "test_finish_stop_regex_str": _MODEL,
        "test_finish_stop_str": _MODEL,
        "test_reasoning_tokens_thinking*": _MODEL,
        "TestSeparateReasoningMixin*": _MODEL,
    },
)


def pytest_configure(config: pytest.Config) -> None:
    kits = Path("test/kits").resolve()

    def real(name: str) -> str | None:
        file = kits / f"{name.rpartition('.')[2]}.py"
        return str(file) if name.startswith("sglang.test.kits.") and file.exists() else None

    filled = {"sglang.test.test_utils": {"CustomTestCase": unittest.TestCase}}
    StandIns(("sglang", "tabulate", "torch", "yaml"), filled, real)
    config.pluginmanager.register(Selection(SUITE))
