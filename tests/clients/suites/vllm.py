"""vLLM's tests of its entrypoints. Their launcher of a server is replaced by the one that runs, and
the rest of vLLM by modules that stand in."""

from __future__ import annotations

import os
import types
from typing import Any

import anthropic
import openai
import pytest
from transformers import AutoTokenizer

from suites.suite import URL, Selection, StandIns, Suite

_CLASSES = "vLLM's own classes, without a server"
_MODEL = "the words, their end, the thoughts, the context or the vocabulary of its model"
_OWN = "its server's own routes and flags (/invocations, --max-logprobs -1, load headers, …)"
_REFUSED = "what is refused by name: adapters, beam search, ids from another server, raw messages"
_WORDING = "a refusal in its own words; the status is the same"
_USAGE = "usage without details, cached tokens counted twice, or text under one name only"
_ENDS = "the last chunk of text ends a choice; OpenAI ends it with a chunk of its own"
_ENTRYPOINTS = "tests/entrypoints"
SUITE = Suite(
    requirement="vllm==0.33.0",
    part="/tests/",
    root="vllm-*",
    files=tuple(
        f"{_ENTRYPOINTS}/{name}.py"
        for name in (
            "anthropic/test_messages",
            *(
                f"openai/chat_completion/test_{each}"
                for each in (
                    *("chat", "chat_completion", "chat_echo", "chat_logit_bias_validation"),
                    *("completion_with_function_calling", "include_reasoning"),
                    *("logprob_token_ids", "thinking_token_budget"),
                )
            ),
            *(
                f"openai/completion/test_{each}"
                for each in ("completion", "prompt_validation", "token_in_token_out")
            ),
            "openai/models/test_models",
            *(
                f"openai/responses/test_{each}"
                for each in ("basic", "function_call", "simple", "stateful", "structured_output")
            ),
            *("openai/test_chunked_prompt", "openai/test_return_token_ids"),
            "openai/test_return_tokens_as_ids",
            *(f"serve/instrumentator/test_{each}" for each in ("basic", "metrics", "orca_metrics")),
            "serve/tokenize/test_tokenization",
        )
    ),
    configured=_ENTRYPOINTS,
    not_applicable={
        "test_chat_completion_request_*": _CLASSES,
        "test_null_top_logprobs_*": _CLASSES,
        "test_completion_request_*": _CLASSES,
        "test_*_request_decouples_top_k_*": _CLASSES,
        "test_completion_rejects_explicit_token_ids_*": _CLASSES,
        "test_requests_reject_explicit_token_ids_*": _CLASSES,
        "test_load_prompt_embeds*": _CLASSES,
        "test_disable_prompt_embeds*": _CLASSES,
        "test_health_check_engine_dead_error": _CLASSES,
        "test_responses_api_logprobs_with_*": _CLASSES,
        "test_metrics.py*": _CLASSES,
        "test_chat_logit_bias_*valid": _CLASSES,
        "zephyr-lora*": _REFUSED,
        "test_check_models": _REFUSED,
        "test_kv_transfer_*": _REFUSED,
        "test_batch_completions*": _REFUSED,
        "test_enable_response_messages*": _REFUSED,
        "test_invocations": _OWN,
        "test_chat_echo.py::test_prompt_logprobs": _OWN,
        "test_chat_echo.py::test_top_logprobs": _OWN,
        "test_*_return_tokens_as_token_ids_completion[[]True]": _OWN,
        "test_show_version": _OWN,
        "test_*_with_orca_header[[]True]": _OWN,
        "test_chat_logit_bias_multiple_non_integer_keys": _WORDING,
        "test_empty_prompt": _WORDING,
        "test_out_of_vocab_token_ids": _WORDING,
        "test_long_seed": _WORDING,
        "test_anthropic_streaming_cache_usage": _USAGE,
        "test_orca_metrics.py::test_single_completion*": _USAGE,
        "test_single_chat_session*": _USAGE,
        "test_detokenize*": _USAGE,
        "test_chat_streaming*": _ENDS,
        "test_chat_completion_stream_options[[]*": _ENDS,
        "test_structured_outputs_choice_chat": _MODEL,
        "test_structured_outputs_json_chat": _MODEL,
        "test_response_format_json_*": _MODEL,
        "test_complex_message_content": _MODEL,
        "test_chat_completion_n_parameter_non_streaming*": _MODEL,
        "test_completion_with_function_calling.py::test_function_tool_use*": _MODEL,
        "test_completion_with_function_calling.py::test_named_tool_use": _MODEL,
        "test_function_call.py::test_function_tool_use*": _MODEL,
        "test_function_call.py::test_function_calling_with_streaming_*": _MODEL,
        "test_basic.py::test_simple_input": _MODEL,
        "test_basic.py::test_instructions": _MODEL,
        "test_basic.py::test_chat": _MODEL,
        "test_stateful.py::test_previous_response_id": _MODEL,
        "test_stateful.py::test_two_responses_with_same_prev_id": _MODEL,
        "test_structured_output.py*": _MODEL,
        "test_*includes_reasoning": _MODEL,
        "test_include_reasoning_true_*": _MODEL,
        "test_reasoning_*": _MODEL,
        "test_thinking_token_budget_limits_reasoning*": _MODEL,
        "test_thinking_token_budget_qwen35_*": _MODEL,
        "test_simple.py::test_max_tokens*": _MODEL,
        "reasoning_tokens_e2e*": _MODEL,
        "test_chunked_prompt.py*": _MODEL,
        "test_request_cancellation*": _MODEL,
        "test_chat_completion_with_emoji_and_token_ids": _MODEL,
        "test_chat_completion_with_tool_use": _MODEL,
        "test_comparison_with_prompt_logprobs_and_logprobs": _MODEL,
        "test_anthropic_structured_output": _MODEL,
        "test_anthropic_tool_call": _MODEL,
        "test_tokenize_*": _MODEL,
    },
    environment={"HF_HUB_OFFLINE": "1"},
)


class Server:
    """The running gateway, in the place of vLLM's launcher."""

    show_hidden_metrics = False

    def __init__(self, *_: object, **__: object) -> None:
        self.host, _, port = URL.rpartition("/")[2].partition(":")
        self.port = int(port)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join((URL, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key="none", **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key="none", **options)

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=URL, api_key="none", **options)


def _tokenizer(*_: object, **__: object) -> Any:
    return AutoTokenizer.from_pretrained(os.environ["OUTRIDER_TOKENIZER"])


def _stand_in() -> None:
    platform = types.SimpleNamespace(
        is_cuda=lambda: True, is_rocm=lambda: False, is_xpu=lambda: False
    )
    int64 = types.SimpleNamespace(min=-(2**63), max=2**63 - 1)
    filled = {
        "tests.conftest": {},
        "tests.utils": {
            "ROCM_EXTRA_ARGS": [],
            "RemoteOpenAIServer": Server,
            "multi_gpu_only": lambda **_: lambda test: test,
            "requires_fp8": lambda test: test,
        },
        "torch": {"iinfo": lambda kind: int64},
        "vllm.model_executor.model_loader.weight_utils": {
            "download_weights_from_hf": lambda *_, **__: "demo"
        },
        "vllm.platforms": {"current_platform": platform},
        "vllm.tokenizers": {"get_tokenizer": _tokenizer},
    }
    StandIns(("pybase64", "torch", "vllm"), filled)


_stand_in()  # before pytest reads the suite's own conftest.py


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Selection(SUITE))
