"""llama.cpp's server tests, from the sources that llama-cpp-python ships."""

from __future__ import annotations

import os
import sys
import types
from typing import Any
from urllib.parse import urlsplit

import pytest

from suites.suite import URL, Selection, Suite

_NATIVE = "llama.cpp's own routes and fields (/completion, /props, /slots, __verbose, n_probs, …)"
_MODEL = "the size or the words of its model"
_FLAGS = "flags of its server (keys, CORS, aliases, several addresses)"
_OTHERWISE = "OpenAI and Anthropic answer otherwise (a role chunk's null, timings, 500 for 400)"
sys.modules.setdefault("wget", types.ModuleType("wget"))  # which would fetch models
SUITE = Suite(
    requirement="llama-cpp-python==0.3.36",
    part="llama.cpp/tools/server/tests/",
    root="*/vendor/llama.cpp/tools/server/tests",
    files=tuple(
        f"unit/test_{name}.py"
        for name in (
            *("basic", "chat_completion", "completion", "compat_anthropic"),
            *("compat_oai_responses", "tokenize", "template", "security", "tool_call"),
        )
    ),
    options=("-m", "not slow"),
    not_applicable={
        "test_server_models": _FLAGS,
        "test_server_model_aliases_and_tags": _FLAGS,
        "test_server_multiple_addresses": _FLAGS,
        "test_no_ui": _FLAGS,
        "test_security.py*": _FLAGS,
        "test_server_props": _NATIVE,
        "test_server_slots": _NATIVE,
        "test_load_split_model": _NATIVE,
        "test_chat_template": _NATIVE,
        "test_chat_template_assistant_prefill*": _NATIVE,
        "test_chat_template_continue_final_message_vllm_compat": _NATIVE,
        "test_apply_chat_template": _NATIVE,
        "test_return_progress*": _NATIVE,
        "test_chat_completions_token_count": _NATIVE,
        "test_verbose_debug": _NATIVE,
        "test_chat_completion.py::test_logit_bias": _NATIVE,
        "test_chat_completion_with_openai_library": _NATIVE,
        "test_completion.py::test_completion_with_openai_library": _NATIVE,
        "test_completion.py::test_completion_stream_with_openai_library": _NATIVE,
        "test_completion.py*": _NATIVE,
        "test_tokenize.py*": _NATIVE,
        "test_template.py*": _NATIVE,
        "test_responses_stream_with_llama_telemetry": _NATIVE,
        "test_responses_with_openai_library": _MODEL,
        "test_anthropic_thinking_history_in_*": _MODEL,
        "test_anthropic_vision_base64_with_multimodal_model": _MODEL,
        "test_context_size_exceeded*": _MODEL,
        "test_chat_completions_multiple_choices": _MODEL,
        "test_chat_completion_cached_tokens": _MODEL,
        "test_chat_completion_with_timings_per_token": _OTHERWISE,
        "test_completion_without_tool_call_fast*STREAMED]": _OTHERWISE,
        "test_logprobs_stream": _OTHERWISE,
        "test_invalid_chat_completion_req[[]messages7]": _OTHERWISE,
        "test_anthropic_messages_basic": _OTHERWISE,
        "test_anthropic_tool_result_with_image": _OTHERWISE,
        "test_anthropic_vision_format_accepted": _OTHERWISE,
        "test_anthropic_empty_messages": _OTHERWISE,
        "test_chat_completion.py::test_chat_completion[[]*": _MODEL,
        "test_chat_completion_stream[[]*": _MODEL,
    },
    environment={"DEBUG_EXTERNAL": "1"},
)


def pytest_configure(config: pytest.Config) -> None:
    port = urlsplit(URL).port
    os.environ["PORT"] = str(port)
    import utils  # type: ignore[import-not-found]  # the suite's own

    def start(self: Any, timeout_seconds: int = 0) -> None:
        self.server_port = port

    built = utils.ServerProcess.make_url

    def make_url(self: Any, path: str, *others: Any) -> str:
        without = ("/chat/completions", "/completions", "/models")  # it serves these, too
        return str(built(self, f"/v1{path}" if path in without else path, *others))

    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.ServerProcess.start = start
    utils.ServerProcess.make_url = make_url
    config.pluginmanager.register(Selection(SUITE))
